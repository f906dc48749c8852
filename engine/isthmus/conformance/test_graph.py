"""Area "graph": the platform's graph policy changes nothing but time; padded, captured and replayed equal eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from isthmus.conformance.compare import assert_close
from isthmus.conformance.engines import exact_dtype
from isthmus.conformance.plugin import target_of
from isthmus.conformance.scripted_steps import (
    MAX_REQS,
    MAX_TOKENS,
    Run,
    Script,
    StepRecord,
    config_of,
    play,
)
from isthmus.conformance.target import Target
from isthmus.platforms import BatchShape, EagerBackend, GraphBackend
from isthmus.platforms.graph import ComputeLogits, Forward
from isthmus.testing.tiny_models import tiny_model

TOLERANCE: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3})
"""dtype -> largest difference of a hidden state, which the last norm brings to the size of 1, that another order of
the same sums explains. On a CPU the scripts differ from float32 by at most 0.034 and 0.27; of two tokens, the hidden
states differ by more than 1 in some element.
"""
INIT_STD = 0.2
"""Small weights, so that a rounding does not grow on its way through the layers."""
MIXED: Script = (
    {"a": 20},
    {"a": 1, "b": 9},
    {"a": 1, "b": 1},
    {"a": 1, "b": 1, "c": 70},
    {"a": 1, "b": 1, "c": 1},
    {"c": 1, "d": 33, "e": 1},
    {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 5},
    {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1},
    {"d": 16},
    {"d": 95, "a": 30},
    {"a": 3, "f": 17, "b": 1},
    {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1, "g": 1},
)
"""Whole prompts, chunks and decodes, alone and together, over sequences of one block and of many."""
REPLAYS: Script = (
    {"short 1": 3, "short 2": 5, "short 3": 7},
    {"short 1": 1, "short 2": 1, "short 3": 1},
    {"long 1": 40, "long 2": 65},
    {"long 3": 100},
    {"chunks 1": 16},
    {"long 1": 1, "long 2": 1, "long 3": 1},
    {"chunks 2": 16},
    {"long 3": 1, "short 1": 1},
    {"short 3": 1, "long 2": 1, "chunks 1": 1},
    {"chunks 2": 16},
    {"long 1": 1, "long 2": 1},
    {"short 1": 1, "short 2": 1, "short 3": 1},
    {"long 3": 16},
    {"chunks 1": 1, "chunks 2": 1},
    {"long 3": 1, "long 2": 1, "long 1": 1},
)
"""Three shapes, each several times, in turns: with other tokens, other blocks, longer sequences, another order."""
SCRIPTS: Mapping[str, Script] = MappingProxyType({"mixed": MIXED, "replays": REPLAYS})

Fact = Callable[[str, object], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In the preferred dtype, for which a platform captures, and in one in which rounding explains little."""
    if "dtype" in metafunc.fixturenames:
        target = target_of(metafunc.config)
        metafunc.parametrize("dtype", dict.fromkeys((target.info.dtypes[0], exact_dtype(target))))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("graph") / "llama", init_std=INIT_STD)


@pytest.fixture(scope="module")
def graph(target: Target, model: Path) -> GraphBackend:
    """The platform's own policy."""
    config = config_of(target, model, target.info.dtypes[0]).config
    return target.platform.graph_backend(config, target.device)


class FurtherPadding(GraphBackend):
    """Pads tokens, requests and a chunk's longest query to more than asked, and then as the platform does."""

    def __init__(self, inner: GraphBackend) -> None:
        self._inner = inner

    def pad(self, shape: BatchShape) -> BatchShape:
        num_tokens = min(power_of_two_above(shape.num_tokens), MAX_TOKENS)
        num_reqs = min(power_of_two_above(shape.num_reqs), MAX_REQS)
        longest = shape.max_query_len
        return self._inner.pad(
            BatchShape(num_tokens, num_reqs, longest if longest == 1 else min(power_of_two_above(longest), num_tokens))
        )

    def wrap(self, forward: Forward) -> Forward:
        return self._inner.wrap(forward)

    def wrap_logits(self, compute_logits: ComputeLogits) -> ComputeLogits:
        return self._inner.wrap_logits(compute_logits)


def power_of_two_above(count: int) -> int:
    return 1 << count.bit_length()


def shapes() -> Iterator[BatchShape]:
    """Every decode, and chunks of many lengths."""
    for num_reqs in range(1, MAX_REQS + 1):
        yield BatchShape(num_reqs, num_reqs, 1)
    for num_reqs, num_tokens in product((1, 2, 3, 7, 8, MAX_REQS), (2, 3, 15, 16, 17, 31, 64, 100, 121, MAX_TOKENS)):
        if num_tokens > num_reqs:
            for longest in sorted({-(-num_tokens // num_reqs), num_tokens - num_reqs + 1}):
                yield BatchShape(num_tokens, num_reqs, longest)


def test_padding_covers_the_shape(graph: GraphBackend) -> None:
    for shape in shapes():
        padded = graph.pad(shape)
        assert covers(padded, shape), f"pad({shape}) = {padded}: each field must be at least as large"


def covers(padded: BatchShape, shape: BatchShape) -> bool:
    return (
        padded.num_tokens >= shape.num_tokens
        and padded.num_reqs >= shape.num_reqs
        and padded.max_query_len >= shape.max_query_len
    )


def test_padding_stays_within_the_engine_s_limits(graph: GraphBackend) -> None:
    for shape in shapes():
        padded = graph.pad(shape)
        assert covers(BatchShape(MAX_TOKENS, MAX_REQS, MAX_TOKENS), padded), (
            f"pad({shape}) = {padded}: a step has room for {MAX_TOKENS} tokens and {MAX_REQS} requests"
        )


def test_padding_twice_is_padding_once(graph: GraphBackend) -> None:
    for shape in shapes():
        padded = graph.pad(shape)
        assert graph.pad(padded) == padded, f"pad({shape}) = {padded}, and pad of that is {graph.pad(padded)}"


def test_warm_up_shapes_are_fixed_points_largest_first(graph: GraphBackend, record_property: Fact) -> None:
    warm_up = list(graph.warmup_shapes())
    record_property("warm-up shapes", len(warm_up))
    for shape in warm_up:
        assert graph.pad(shape) == shape, (
            f"warmup_shapes has {shape}, which no step runs at: pad gives {graph.pad(shape)}"
        )
    sizes = [shape.num_tokens for shape in warm_up]
    assert sizes == sorted(sizes, reverse=True), f"warmup_shapes has num_tokens {sizes}; the largest must come first"
    assert len(set(warm_up)) == len(warm_up), f"warmup_shapes has a shape twice: {warm_up}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_steps_equal_eager_ones(target: Target, model: Path, name: str, dtype: str, record_property: Fact) -> None:
    """Hidden states of every real token. What a step wrote to the cache shows in the steps after it."""
    expected = play(target, model, dtype, SCRIPTS[name], eager(target))
    got = play(target, model, dtype, SCRIPTS[name], own)
    record_property(f"{name} {dtype}", summary(got, expected))
    assert_same_steps(got, expected, dtype)


@pytest.mark.parametrize("name", SCRIPTS)
def test_more_padding_changes_nothing(
    target: Target, model: Path, name: str, dtype: str, record_property: Fact
) -> None:
    """Under the platform's own policy, at shapes further up."""
    expected = play(target, model, dtype, SCRIPTS[name], eager(target))
    got = play(target, model, dtype, SCRIPTS[name], FurtherPadding)
    record_property(f"{name} {dtype}, more padding", summary(got, expected))
    assert any(record.padded != record.asked for record in got.records)
    assert_same_steps(got, expected, dtype)


def test_padding_writes_to_no_block(target: Target, model: Path, dtype: str) -> None:
    """The blocks that no request had are as empty as they were made."""
    run = play(target, model, dtype, MIXED, FurtherPadding)
    blocks = torch.tensor(run.unowned_blocks, device=target.device)
    for layer, (backend, cache) in enumerate(zip(run.backends, run.caches, strict=True)):
        for index, (tensor, spec) in enumerate(zip(cache, backend.kv_cache_layout(1).tensors, strict=True)):
            bits = tensor.index_select(spec.block_dim, blocks).cpu().contiguous().flatten().view(torch.uint8)
            assert not bits.any(), f"layer {layer}, cache tensor {index}: blocks that belong to no request were written"


def test_the_same_shape_comes_at_the_same_addresses(target: Target, model: Path, dtype: str) -> None:
    """Inputs, the batch's tensors, and metadata that a captured step may contain: a replay reads where it read."""
    if target.platform.static_shapes:
        pytest.skip("static shapes: inputs are new tensors in each step, and programs read values, not addresses")
    first: dict[BatchShape, Mapping[str, int]] = {}
    records = play(target, model, dtype, REPLAYS, own).records
    for number, record in enumerate(records, 1):
        before, now = first.setdefault(record.padded, record.addresses), record.addresses
        moved = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        assert moved == [], f"step {number} at {record.padded}: moved since the first of this shape: {', '.join(moved)}"
    assert len(first) < len(records), f"no shape came twice: {list(first)}"


def own(graph: GraphBackend) -> GraphBackend:
    """The platform's policy as it is."""
    return graph


def eager(target: Target) -> Callable[[GraphBackend], GraphBackend]:
    """No padding, no capture."""
    return lambda graph: EagerBackend(target.platform.inference_mode)


def assert_same_steps(got: Run, expected: Run, dtype: str) -> None:
    for number, (ours, theirs) in enumerate(zip(got.records, expected.records, strict=True), 1):
        what = f"step {number} of {len(got.records)}, {ours.asked} run at {ours.padded}, against eager"
        assert_close(ours.hidden, theirs.hidden, rtol=0.0, atol=TOLERANCE[dtype], what=what)


def summary(got: Run, expected: Run) -> str:
    pairs: list[tuple[StepRecord, StepRecord]] = list(zip(got.records, expected.records, strict=True))
    num_padded = sum(ours.padded != ours.asked for ours, _ in pairs)
    num_equal = sum(torch.equal(ours.hidden, theirs.hidden) for ours, theirs in pairs)
    worst = max(float((ours.hidden.double() - theirs.hidden.double()).abs().max()) for ours, theirs in pairs)
    return f"{len(pairs)} steps, {num_padded} padded, {num_equal} equal to the last bit, worst difference {worst:.2g}"
