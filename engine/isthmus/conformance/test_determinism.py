"""Area "determinism": the same inputs give the same bits. Whether batch mates change bits is measured, not asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import pytest
import torch

from isthmus import LLM, RequestOutput, SamplingParams
from isthmus.conformance.attention_harness import PagedCache, Row
from isthmus.conformance.compare import assert_close, assert_equal, name_of
from isthmus.conformance.op_inputs import op_inputs
from isthmus.conformance.plugin import target_of
from isthmus.conformance.selected import (
    attention_spec,
    compared_dtypes,
    selected_attention,
    selected_linear,
    selected_ops,
)
from isthmus.conformance.target import Target
from isthmus.platforms import LinearSpec
from isthmus.testing.tiny_models import PROMPTS, tiny_model

NUM_RUNS = 4
BATCH_SIZES = (2, 7, 32)
NUM_ROWS = 32
NUM_TOKENS = 24
LINEAR_SPECS = ((4096, 256), (576, 1536))
CLOSE = MappingProxyType({torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3})
"""A row's results alone and in a batch may differ in bits, but not by more than this: values are near 1."""
FAMILIES = ("llama", "gemma3")
WIDER: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64, "init_std": 0.06}
)
"""Sums as short as those of the tiny models have the same bits in nearly any order."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    target = target_of(metafunc.config)
    dtypes = compared_dtypes(target)
    if "op_name" in metafunc.fixturenames:
        metafunc.parametrize("op_name", target.registry.ops)
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", dtypes, ids=name_of)
    if "llm" in metafunc.fixturenames:
        models = [(family, name_of(dtype)) for family in FAMILIES for dtype in dtypes]
        metafunc.parametrize("llm", models, ids="-".join, indirect=True, scope="module")


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """On the host."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_repeats(run: Callable[[], Sequence[torch.Tensor]], what: str) -> None:
    """Bits of every result are the same each time."""
    first = [result.cpu() for result in run()]
    for again in range(1, NUM_RUNS):
        for place, (result, was) in enumerate(zip(run(), first, strict=True)):
            assert_equal(result, was, what=f"{what}: result {place} of run {again + 1} against the first")


def test_an_op_repeats(target: Target, op_name: str, dtype: torch.dtype) -> None:
    function = getattr(selected_ops(target), op_name)
    for name, arguments in op_inputs(target.registry.ops[op_name], target.device, dtype):

        def run(arguments: tuple[Any, ...] = arguments) -> Sequence[torch.Tensor]:
            with target.platform.inference_mode():
                results = function(*arguments)
            return (results,) if isinstance(results, torch.Tensor) else results

        assert_repeats(run, f"{op_name}-{name_of(dtype)}-{name}")


def linear_layer(target: Target, spec: LinearSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [T, in] on the host -> [T, out] on the device, through the selected backend."""
    backend = selected_linear(target, spec)
    weight = randn(spec.out_features, spec.in_features, dtype=torch.float32, seed=1) * spec.in_features**-0.5
    with target.platform.inference_mode():
        packed = backend.pack(weight.to(target.device, spec.dtype))

    def layer(x: torch.Tensor) -> torch.Tensor:
        with target.platform.inference_mode():
            return backend.apply(x.to(target.device), packed, None)

    return layer


@pytest.mark.parametrize(("in_features", "out_features"), LINEAR_SPECS)
def test_a_linear_layer_repeats(target: Target, dtype: torch.dtype, in_features: int, out_features: int) -> None:
    layer = linear_layer(target, LinearSpec(in_features, out_features, dtype))
    for rows in (1, 7, 256):
        x = randn(rows, in_features, dtype=dtype, seed=rows)
        assert_repeats(lambda x=x: (layer(x),), f"{rows} rows")  # type: ignore[misc]


class Decodes:
    """Sequences of many lengths, each with its next token at hand, on the selected backend."""

    def __init__(self, target: Target, dtype: torch.dtype) -> None:
        self._device = target.device
        spec = attention_spec(target, dtype, num_heads=8, num_kv_heads=2, head_dim=64)
        lens = [1 + 37 * index % 300 for index in range(NUM_ROWS)]
        ends = list(accumulate((-(-length // spec.block_size) for length in lens), initial=1))
        self.cache = PagedCache(target, selected_attention(target, spec), spec, ends[-1])
        self.prompts, self.rows = [], []
        for index, length in enumerate(lens):
            heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
            q, k, v = (randn(length, n, spec.head_dim, dtype=dtype, seed=3 * index + at) for at, n in enumerate(heads))
            blocks = range(ends[index], ends[index + 1])
            self.rows.append(Row(q[-1:], k[-1:], v[-1:], length - 1, blocks))
            if length > 1:
                self.prompts.append(Row(q[:-1], k[:-1], v[:-1], 0, blocks))

    def attend(self, rows: Sequence[Row]) -> torch.Tensor:
        """One step of these rows; [T, H, D] on the device."""
        q, k, v = (torch.cat(parts).to(self._device) for parts in zip(*((r.q, r.k, r.v) for r in rows), strict=True))
        batch = self.cache.batch(rows)
        with self.cache.target.platform.inference_mode():
            metadata = self.cache.backend.build_metadata(batch)
            return self.cache.backend.forward(q, k, v, self.cache.tensors, metadata)


def test_attention_repeats(target: Target, dtype: torch.dtype) -> None:
    """Prompts, then a decode of all, each time into the same blocks; the cache itself included."""
    decodes = Decodes(target, dtype)

    def run() -> Sequence[torch.Tensor]:
        return (decodes.attend(decodes.prompts), decodes.attend(decodes.rows), *decodes.cache.tensors)

    assert_repeats(run, f"{type(decodes.cache.backend).name} attention of prompts, of decodes, and the cache")


def share_of_equal_rows(run: Callable[[int], torch.Tensor], dtype: torch.dtype) -> str:
    """run(n): results of the same rows [N, ...] in batches of n. Says for each batch size how many rows are bit-equal
    to those computed alone. Raises AssertionError where they are not even close.
    """
    alone = run(1)
    shares = []
    for size in BATCH_SIZES:
        together = run(size)
        tolerance = CLOSE.get(dtype, 0.1)
        assert_close(together, alone, rtol=tolerance, atol=tolerance, what=f"rows in batches of {size} against alone")
        equal = (bits(together) == bits(alone)).all(dim=1)
        shares.append(f"{size}: {percent(int(equal.sum()), len(equal))}")
    return ", ".join(shares)


def bits(rows: torch.Tensor) -> torch.Tensor:
    """rows [N, ...] as bytes [N, B]."""
    return rows.flatten(1).contiguous().view(torch.uint8)


def percent(count: int, total: int) -> str:
    return f"{100 * count / total:.0f} %"


def test_rows_of_a_linear_layer_in_a_batch(target: Target, dtype: torch.dtype, record_property: Any) -> None:
    layer = linear_layer(target, LinearSpec(*LINEAR_SPECS[0], dtype))
    x = randn(NUM_ROWS, LINEAR_SPECS[0][0], dtype=dtype, seed=5)
    shares = share_of_equal_rows(lambda size: torch.cat([layer(part).cpu() for part in x.split(size)]), dtype)
    record_property(f"linear rows equal alone and in a batch, {name_of(dtype)}", shares)


def test_rows_of_a_norm_in_a_batch(target: Target, dtype: torch.dtype, record_property: Any) -> None:
    norm = selected_ops(target).rms_norm
    x, weight = (randn(*shape, dtype=dtype, seed=6).to(target.device) for shape in ((NUM_ROWS, 2048), (2048,)))

    def run(size: int) -> torch.Tensor:
        with target.platform.inference_mode():
            return torch.cat([norm(part, weight, 1e-6).cpu() for part in x.split(size)])

    record_property(f"rms_norm rows equal alone and in a batch, {name_of(dtype)}", share_of_equal_rows(run, dtype))


def test_decodes_in_a_batch(target: Target, dtype: torch.dtype, record_property: Any) -> None:
    decodes = Decodes(target, dtype)
    decodes.attend(decodes.prompts)

    def run(size: int) -> torch.Tensor:
        parts = (decodes.rows[at : at + size] for at in range(0, NUM_ROWS, size))
        return torch.cat([decodes.attend(part).cpu() for part in parts])

    shares = share_of_equal_rows(run, dtype)
    record_property(f"attention decodes equal alone and in a batch, {name_of(dtype)}", shares)


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine on a tiny model; the parameter is (family, dtype)."""
    family, dtype = request.param
    path = tiny_model(family, tmp_path_factory.mktemp(family), **WIDER)
    engine = LLM(
        str(path),
        plugins=target.plugins,
        device=target.name,
        dtype=dtype,
        num_blocks=128,
        max_num_seqs=16,
        enable_prefix_caching=False,
        **target.settings,
    )
    yield engine
    engine.shutdown()


REQUESTS: tuple[tuple[str, SamplingParams], ...] = tuple(
    (prompt, SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, logprobs=3, ignore_eos=True))
    for seed, prompt in enumerate(PROMPTS)
    for temperature in (0.0, 1.0)
)
"""Each prompt greedy and at random."""


def generate(llm: LLM, requests: Sequence[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    prompts, params = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(params), progress=False)


def difference(first: RequestOutput, second: RequestOutput) -> str | None:
    """Where two runs of one request part: prompt, position, both ids or both log-probabilities. None = nowhere."""
    (one,), (other,) = first.outputs, second.outputs
    for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        if a != b:
            return f"prompt {first.prompt!r}, output token {at}: id {a}, then {b}"
    for at, (before, after) in enumerate(zip(one.logprobs or (), other.logprobs or (), strict=True)):
        if before != after:
            was, now = ({token: entry.logprob for token, entry in found.items()} for found in (before, after))
            return f"prompt {first.prompt!r}, output token {at}: the same id, log-probabilities {was}, then {now}"
    return None


def test_a_model_repeats(llm: LLM) -> None:
    """The second run gets other blocks of the pool, which must not matter either."""
    first, second = generate(llm, REQUESTS), generate(llm, REQUESTS)
    parted = [text for text in map(difference, first, second) if text is not None]
    assert parted == [], f"{len(parted)} of {len(REQUESTS)} requests differ between two runs of the same batch:\n" + (
        "\n".join(parted)
    )


def test_requests_in_a_batch(llm: LLM, request: pytest.FixtureRequest, record_property: Any) -> None:
    together = generate(llm, REQUESTS)
    alone = [generate(llm, [one])[0] for one in REQUESTS]
    for output in (*together, *alone):
        assert len(output.outputs[0].token_ids) == NUM_TOKENS, f"prompt {output.prompt!r} ended early"
    same_tokens = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(alone, together, strict=True))
    same_bits = sum(difference(a, b) is None for a, b in zip(alone, together, strict=True))
    family, dtype = request.node.callspec.params["llm"]
    record_property(
        f"{family} requests equal alone and in a batch of {len(REQUESTS)}, {dtype}",
        f"tokens: {percent(same_tokens, len(REQUESTS))}, log-probabilities: {percent(same_bits, len(REQUESTS))}",
    )
