"""Area "attention": every registered backend against textbook attention in float64, through its own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from isthmus.conformance.attention_cases import (
    NO_PADDING,
    SCENARIOS,
    VARIANTS,
    Case,
    Scenario,
    layer_cases,
    padded_cases,
    replay_cases,
    textbook_cases,
    thinned,
    tolerance,
)
from isthmus.conformance.attention_harness import PagedCache, Play, Row, skip_unsupported
from isthmus.conformance.compare import assert_close, assert_equal, name_of
from isthmus.conformance.plugin import is_thin, target_of
from isthmus.conformance.target import Target
from isthmus.ops.registry import NATIVE
from isthmus.platforms import AttentionBackend, AttentionSpec, BatchShape, GraphSupport

MATRICES: Mapping[str, Callable[[Sequence[torch.dtype]], Iterator[Case]]] = MappingProxyType(
    {
        "test_equals_the_textbook": textbook_cases,
        "test_padding_changes_nothing": padded_cases,
        "test_layers_share_metadata": layer_cases,
        "test_recorded_metadata_serves_later_steps_of_its_shape": replay_cases,
    }
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    target = target_of(metafunc.config)
    asked = tuple(MATRICES[metafunc.function.__name__](target.dtypes))
    parameters = [
        pytest.param(
            backend,
            VARIANTS[variant].spec(dtype),
            SCENARIOS[scenario](VARIANTS[variant].block_size),
            id=f"{name}-{name_of(dtype)}-{variant}-{scenario}",
        )
        for name, backend in target.attention_backends.items()
        for variant, dtype, scenario in (kept_of(name, asked, target) if is_thin(metafunc.config) else asked)
    ]
    metafunc.parametrize(("backend", "spec", "scenario"), parameters)


def kept_of(backend: str, cases: Sequence[Case], target: Target) -> Iterator[Case]:
    """What is asked of a backend where all of it takes too long."""
    chosen = backend == NATIVE or backend in target.platform.kernel_priority().get("attention", ())
    return thinned(cases, target.dtypes[0], by_name_only=not chosen)


@pytest.fixture(scope="session")
def worst() -> dict[str, float]:
    """Largest error so far by backend and dtype."""
    return {}


def test_equals_the_textbook(
    target: Target,
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    scenario: Scenario,
    worst: dict[str, float],
    record_property: Callable[[str, object], None],
) -> None:
    skip_unsupported(target, backend, spec)
    error = Play(target, backend, spec, scenario).run()
    what = f"{backend.name} {name_of(spec.dtype)}, largest error as a share of the tolerance"
    worst[what] = max(error, worst.get(what, 0.0))
    record_property(what, round(worst[what], 3))


def test_padding_changes_nothing(
    target: Target, backend: type[AttentionBackend], spec: AttentionSpec, scenario: Scenario
) -> None:
    """Steps with padding, which is NaN, are right and leave the cache as steps without it do, bit for bit."""
    skip_unsupported(target, backend, spec)
    padded = Play(target, backend, spec, scenario)
    plain = Play(target, backend, spec, replace(scenario, padding=NO_PADDING))
    for step, _ in enumerate(zip(padded.steps(), plain.steps(), strict=True)):
        for index, (got, want) in enumerate(zip(padded.cache.tensors, plain.cache.tensors, strict=True)):
            assert_equal(got, want, what=f"tensor {index} of the cache after step {step} with {scenario.padding} added")


class TwoLayers(PagedCache):
    """Every step runs a second layer with the same metadata, on a cache of its own and the negative of every value."""

    def __init__(self, target: Target, backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int) -> None:
        self._second = PagedCache(target, backend, spec, num_blocks)
        super().__init__(target, backend, spec, num_blocks)

    def step(self, rows: Sequence[Row], padding: BatchShape = NO_PADDING) -> torch.Tensor:
        batch = self.batch(rows, padding)
        metadata = self.backend.build_metadata(batch)
        first = self.forward(rows, batch, metadata)
        self._second.backend = self.backend
        second = self._second.forward([replace(row, v=-row.v) for row in rows], batch, metadata)
        limit = tolerance(self.spec.dtype)
        assert_close(
            second, -first, rtol=limit, atol=limit, what="a second layer, its values the negative of the first's"
        )
        return first


def test_layers_share_metadata(
    target: Target, backend: type[AttentionBackend], spec: AttentionSpec, scenario: Scenario
) -> None:
    skip_unsupported(target, backend, spec)
    Play(target, backend, spec, scenario, TwoLayers).run()


class ReplayedCache(PagedCache):
    """Steps as a captured graph makes them: it reads what it was recorded with, whatever the metadata says now.

    The first step of each shape that the backend's `graph_support` covers records.
    """

    def __init__(self, target: Target, backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int) -> None:
        self._recorded: dict[BatchShape, tuple[Any, dict[str, int]]] = {}
        super().__init__(target, backend, spec, num_blocks)

    def step(self, rows: Sequence[Row], padding: BatchShape = NO_PADDING) -> torch.Tensor:
        batch = self.batch(rows, padding)
        metadata = self.backend.build_metadata(batch)
        shape = BatchShape(len(batch.slot_mapping), batch.num_reqs, batch.max_query_len)
        if not self._is_capturable(shape):
            return self.forward(rows, batch, metadata)
        recorded, before = self._recorded.setdefault(shape, (metadata, addresses(metadata)))
        now = addresses(metadata)
        if now != before:
            raise AssertionError(f"{shape} again, but metadata is elsewhere: {moved(before, now)}")
        return self.forward(rows, batch, recorded)

    def _is_capturable(self, shape: BatchShape) -> bool:
        support = self.backend.graph_support
        return support is GraphSupport.ALWAYS or (support is GraphSupport.UNIFORM_DECODE and shape.max_query_len == 1)


def test_recorded_metadata_serves_later_steps_of_its_shape(
    target: Target, backend: type[AttentionBackend], spec: AttentionSpec, scenario: Scenario
) -> None:
    """Same `BatchShape`, same addresses; and a kernel launched with the first metadata does the later steps right."""
    assert isinstance(backend.graph_support, GraphSupport), f"graph_support is {backend.graph_support!r}"
    skip_unsupported(target, backend, spec)
    Play(target, backend, spec, scenario, ReplayedCache).run()


def addresses(metadata: Any, path: str = "metadata") -> dict[str, int]:
    """Where each tensor of a metadata lives, by its place in dataclasses, mappings and sequences."""
    if isinstance(metadata, torch.Tensor):
        return {path: metadata.data_ptr()}
    found: dict[str, int] = {}
    for name, part in _parts(metadata):
        found |= addresses(part, path + name)
    return found


def _parts(metadata: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(metadata):
        yield from ((f".{one.name}", getattr(metadata, one.name)) for one in fields(metadata))
    elif isinstance(metadata, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in metadata.items())
    elif isinstance(metadata, (tuple, list)):
        yield from ((f"[{index}]", part) for index, part in enumerate(metadata))


def moved(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Each tensor whose address changed."""
    return ", ".join(
        f"{path} from {before.get(path, 0):#x} to {now.get(path, 0):#x}"
        for path in sorted(before.keys() | now.keys())
        if before.get(path) != now.get(path)
    )
