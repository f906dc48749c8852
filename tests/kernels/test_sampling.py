"""The `sample` op and the Sampler against slow, obvious references."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.ops.registry import BoundOps, KernelRegistry
from isthmus.ops.sampling import GAMMA, SAMPLE, WEIGHT_BITS, _num_kept, _weights, mix64, sample
from isthmus.sampling_params import SamplingParams
from isthmus.worker.sampler import Sampler, SamplerOutput

VOCAB = 37


def _logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _draw(logits: torch.Tensor, count: int, **filters: float) -> list[int]:
    """`count` draws from one row [V], seeds 0, 1, 2 ..., all in one batch."""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.full((count,), filters[name], dtype=dtype) if name in filters else None

    temperature = torch.full((count,), filters.get("temperature", 1.0))
    tokens = sample(
        logits.expand(count, -1),
        temperature,
        column("top_k", torch.int64),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        torch.arange(count),
    )
    return [int(token) for token in tokens]


# ---- the op


def test_mix64_is_splitmix64() -> None:
    """First outputs of the reference generator for seed 1234567."""
    states = 1234567 + torch.arange(1, 6) * GAMMA
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [int(value) % 2**64 for value in mix64(states)] == expected


def test_weights_are_those_of_the_definition() -> None:
    scaled = -torch.linspace(0, 30, 100001)
    wanted = scaled.double().exp() * 2.0**WEIGHT_BITS
    assert float(((_weights(scaled) - wanted).abs() - 1e-6 * wanted).max()) <= 1


def test_weights_have_the_same_bits_everywhere() -> None:
    """Another of any of these is another token for somebody's seed."""
    scaled = torch.tensor([0.0, -0.0, -1e-30, -0.34657, -0.34658, -1.0, -7.3, -20.0, -27.0, -28.0, -1e30, -torch.inf])
    assert _weights(scaled).tolist() == [
        *(2**40, 2**40, 2**40, 777474867200, 777467068416, 404487733248, 742762496, 2266, 2, 0, 0, 0)
    ]


def _kept_by_definition(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """temperature -> min_p -> top_k -> top_p, one row, one token at a time, in Python floats."""
    scaled = [value / temperature for value in logits.tolist()]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    ids = [i for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)) if weights[i] >= min_p]
    if top_k > 0:
        ids = ids[:top_k]
    total, running, kept = sum(weights[i] for i in ids), 0.0, set()
    for i in ids:
        if running >= top_p * total:
            break
        kept.add(i)
        running += weights[i]
    return kept


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB])
@pytest.mark.parametrize("top_p", [1.0, 0.6, 0.05])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_support_and_frequencies_match_the_definition(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits, count = _logits(VOCAB, scale=1.0), 4000
    kept = _kept_by_definition(logits, temperature, top_k, top_p, min_p)
    tokens = Counter(_draw(logits, count, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert set(tokens) <= kept
    weights = {i: math.exp(float(logits[i]) / temperature) for i in kept}
    total = sum(weights.values())
    chi_square = sum((tokens[i] - count * w / total) ** 2 / (count * w / total) for i, w in weights.items())
    # Mean of chi-square is the degrees of freedom, its standard deviation sqrt(2 * that).
    freedom = len(kept) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("vocab_size", [2, 255, 256, 257, 2000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_k", [0, 1, 200, 300, 1500])
def test_nucleus_is_exact_whether_the_front_or_the_whole_row_is_sorted(
    vocab_size: int, scale: float, top_k: int
) -> None:
    logits = _logits(vocab_size, seed=vocab_size, scale=scale)
    expected = [len(_kept_by_definition(logits, 1.0, top_k, p, 0.0)) for p in (0.8, 0.1, 0.999)]
    scaled = (logits - logits.max()).expand(3, -1)
    assert _num_kept(scaled, torch.full((3,), top_k), torch.tensor([0.8, 0.1, 0.999])).tolist() == expected


def _unmix64(value: int) -> int:
    """The seed of `sample` whose uniform number has the bits of `value`."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        undone = value
        for _ in range(3):
            undone = value ^ (undone >> shift)
        value = undone * pow(factor, -1, 2**64) % 2**64
    return (value - GAMMA + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(("bits", "expected"), [(0, 2), (2**64 - 1, VOCAB - 3)])
def test_the_ends_of_the_unit_interval_never_draw_a_masked_token(bits: int, expected: int) -> None:
    logits = _logits(1, VOCAB)
    logits[0, [0, 1, -2, -1]] = -torch.inf
    assert sample(logits, torch.ones(1), None, None, None, torch.tensor([_unmix64(bits)])).tolist() == [expected]


def test_a_row_of_nan_harms_no_neighbour() -> None:
    logits = _logits(3, VOCAB)
    logits[1] = torch.nan
    columns = (torch.ones(3), torch.full((3,), 5), torch.full((3,), 0.9), torch.full((3,), 0.01), torch.arange(3))
    expected = sample(logits[::2], *(column[::2] for column in columns))
    assert torch.equal(sample(logits, *columns)[::2], expected)
    assert torch.equal(
        sample(logits, columns[0], None, columns[2], None, columns[4])[1:2] < VOCAB, torch.tensor([True])
    )


def test_equal_logits_keep_the_lower_ids() -> None:
    logits = torch.zeros(VOCAB)
    assert set(_draw(logits, 500, top_k=3)) == {0, 1, 2}
    assert set(_draw(logits, 500, top_p=3.5 / VOCAB)) == {0, 1, 2, 3}
    logits[[20, 30]] = 5.0
    assert set(_draw(logits, 50, top_k=1)) == {20}


def test_top_k_off_values_a9() -> None:
    logits = _logits(VOCAB)
    plain = _draw(logits, 64, temperature=5.0)
    assert len(set(plain)) > 1
    for off in (0, -1, VOCAB, VOCAB + 1000):
        assert _draw(logits, 64, temperature=5.0, top_k=off) == plain
    assert set(_draw(logits, 64, temperature=5.0, top_k=1)) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45])
def test_tiny_temperature_is_argmax_without_overflow(temperature: float) -> None:
    logits = _logits(VOCAB) * 50
    assert set(_draw(logits, 20, temperature=temperature)) == {int(logits.argmax())}


def test_huge_temperature_is_uniform_over_what_is_not_masked() -> None:
    logits = _logits(VOCAB)
    logits[5] = -torch.inf
    tokens = Counter(_draw(logits, 3600, temperature=1e30))
    assert set(tokens) == set(range(VOCAB)) - {5}
    assert max(tokens.values()) < 160


def test_greedy_is_argmax_with_and_without_random_neighbours() -> None:
    logits = _logits(6, VOCAB)
    seeds = torch.arange(6)
    greedy = logits.argmax(dim=-1)
    assert torch.equal(sample(logits, None, None, None, None, seeds), greedy)
    mixed = sample(logits, torch.tensor([0.0, 9.0] * 3), None, torch.full((6,), 0.99), None, seeds)
    assert torch.equal(mixed[::2], greedy[::2])
    assert not torch.equal(mixed, greedy)


@pytest.mark.parametrize("vocab_size", [33, 1031])
def test_a_row_does_not_depend_on_its_batch(vocab_size: int) -> None:
    num_rows = 24
    logits = _logits(num_rows, vocab_size)
    generator = torch.Generator().manual_seed(1)

    def pick(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        index = torch.randint(len(values), (num_rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[index]

    columns = (
        pick([0.0, 0.5, 1.0, 2.0], torch.float32),
        pick([0, 1, 7, 300, vocab_size], torch.int64),
        pick([1.0, 0.9, 0.3], torch.float32),
        pick([0.0, 0.05], torch.float32),
        torch.arange(num_rows) * 7919,
    )
    together = sample(logits, *columns)
    for size in (1, 2, 5, 13):
        for repeat in range(6):
            order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(repeat))[:size]
            apart = sample(logits[order], *(column[order] for column in columns))
            assert torch.equal(apart, together[order])
    # A filter that a row does not use may be present or absent.
    off = (columns[1] == 0) & (columns[2] == 1) & (columns[3] == 0)
    assert off.any()
    assert torch.equal(sample(logits[off], columns[0][off], None, None, None, columns[4][off]), together[off])


def test_logits_are_not_changed() -> None:
    logits = _logits(3, VOCAB)
    before = logits.clone()
    _draw(logits[0], 5, top_k=2, top_p=0.5, min_p=0.1)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", list(SAMPLE.tolerances))
def test_make_inputs_are_valid(dtype: torch.dtype) -> None:
    for inputs in SAMPLE.make_inputs(torch.device("cpu"), dtype):
        tokens = SAMPLE.native(*inputs)
        assert tokens.dtype == torch.int64
        assert tokens.shape == inputs[0].shape[:1]
        assert ((tokens >= 0) & (tokens < inputs[0].shape[1])).all()


# ---- the Sampler


class _Recorder:
    """BoundOps' sample, remembering what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.calls.append(arguments)
        return sample(*arguments)


class _Bench:
    """A Sampler with its rows' tokens, for tests."""

    def __init__(self, vocab_size: int = VOCAB, max_num_rows: int = 8) -> None:
        self.op = _Recorder()
        ops = BoundOps({"sample": self.op}, {"sample": "recorder"})
        self.sampler = Sampler(vocab_size, max_num_rows, ops)
        self.token_ids = np.zeros((max_num_rows, 64), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_rows, dtype=np.int32)

    def add(
        self,
        row: int,
        params: SamplingParams,
        prompt: list[int] | None = None,
        output: list[int] | None = None,
        **kw: Any,
    ) -> None:
        prompt = [1] if prompt is None else prompt
        tokens = prompt + (output or [])
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.sampler.add(row, params, **{"seed": row, "num_prompt_tokens": len(prompt)} | kw)

    def step(self, logits: torch.Tensor, rows: list[int]) -> SamplerOutput:
        return self.sampler.sample(logits, np.asarray(rows), self.token_ids, self.num_tokens)

    def adjusted(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """The logits that reach the op."""
        self.step(logits, rows)
        return self.op.calls[-1][0]

    def generate(self, logits: torch.Tensor, rows: list[int], steps: int) -> dict[int, list[int]]:
        """Sample `steps` tokens a row, the logits being the same at each step."""
        tokens: dict[int, list[int]] = {row: [] for row in rows}
        for _ in range(steps):
            for row, token in zip(rows, self.step(logits[rows], rows).token_ids.tolist(), strict=True):
                tokens[row].append(token)
                self.token_ids[row, self.num_tokens[row]] = token
                self.num_tokens[row] += 1
        return tokens


def test_registered_op_is_found_by_the_sampler() -> None:
    registry = KernelRegistry()
    registry.define(SAMPLE)
    sampler = Sampler(VOCAB, 1, registry.bind_ops({}))
    sampler.add(0, SamplingParams(temperature=0), seed=0, num_prompt_tokens=1)
    logits = _logits(1, VOCAB)
    output = sampler.sample(logits, np.array([0]), np.zeros((1, 4), np.int32), np.ones(1, np.int64))
    assert torch.equal(output.token_ids, logits.argmax(dim=-1))


def test_plain_greedy_batch_is_one_call_without_filters_or_copy() -> None:
    bench = _Bench()
    for row in range(3):
        bench.add(row, SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.5))
    logits = _logits(3, VOCAB)
    output = bench.step(logits, [2, 0, 1])
    ((given, *filters, seeds),) = bench.op.calls
    assert given is logits
    assert filters == [None] * 4
    assert seeds.dtype == torch.int64
    assert output == SamplerOutput(output.token_ids, None, ())


def test_filters_are_passed_only_when_a_row_of_the_batch_uses_them() -> None:
    bench = _Bench()
    bench.add(0, SamplingParams(temperature=0.5))
    bench.add(1, SamplingParams(top_k=4))
    bench.add(2, SamplingParams(top_k=VOCAB, top_p=1.0))
    logits = _logits(8, VOCAB)
    for rows, expected in (([0, 2], None), ([2, 1], [VOCAB, 4])):
        bench.step(logits[rows], rows)
        _, temperature, top_k, top_p, min_p, _ = bench.op.calls[-1]
        assert temperature is not None
        assert (None if top_k is None else top_k.tolist()) == expected
        assert top_p is None
        assert min_p is None


def test_seeded_request_ignores_batch_mates_row_and_preemption_a8() -> None:
    params = SamplingParams(temperature=2.0)
    logits = _logits(1, VOCAB).expand(8, -1)
    alone = _Bench()
    alone.add(0, params, seed=42)
    expected = alone.generate(logits, [0], 16)[0]
    assert len(set(expected)) > 4

    crowded = _Bench()
    crowded.add(5, params, seed=42)
    crowded.add(1, SamplingParams(temperature=0.7, top_k=3), seed=7)
    crowded.add(2, SamplingParams(temperature=0), seed=8)
    tokens = crowded.generate(logits, [1, 5, 2], 9)
    assert tokens[5] == expected[:9]

    resumed = _Bench()
    resumed.add(3, params, output=expected[:9], seed=42)
    assert resumed.generate(logits, [3], 7)[3] == expected[9:]

    other = _Bench()
    other.add(0, params, seed=43)
    assert other.generate(logits, [0], 16)[0] != expected


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    bench = _Bench()
    bench.add(0, SamplingParams(), seed=seed)
    again = _Bench()
    again.add(0, SamplingParams(), seed=seed % 2**64)
    logits = _logits(1, VOCAB)
    assert bench.generate(logits, [0], 5) == again.generate(logits, [0], 5)


def test_masks_and_bias_reach_only_their_row() -> None:
    bench = _Bench()
    bench.add(0, SamplingParams(allowed_token_ids=[3, 9, 9]))
    bench.add(1, SamplingParams(logit_bias={"4": -100, 5: 7.5}))
    bench.add(2, SamplingParams(bad_words=["x"]), bad_words_ids=[(6,), (7, 8)])
    bench.add(3, SamplingParams())
    logits = _logits(4, VOCAB)
    expected = logits.clone()
    expected[0] = -torch.inf
    expected[0, [3, 9]] = logits[0, [3, 9]]
    expected[1, 4] -= 100
    expected[1, 5] += 7.5
    expected[2, 6] = -torch.inf
    order = [2, 3, 0, 1]
    given = logits[order]
    assert torch.equal(bench.adjusted(given, order), expected[order])
    assert torch.equal(given, logits[order])


def test_bias_cannot_lift_a_mask() -> None:
    bench = _Bench()
    bench.add(0, SamplingParams(temperature=0, allowed_token_ids=[3, 4], logit_bias={9: 100}))
    assert bench.adjusted(_logits(1, VOCAB), [0])[0].isfinite().nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize(
    ("history", "banned"),
    [
        ([7], {3}),
        ([2, 7], {3, 9}),
        ([1, 2, 7], {3, 9}),
        ([5, 5, 7], {3}),
        ([7, 2], {4}),
        ([2], {4}),
        ([7, 7, 7, 5], set()),
        ([1, 1], set()),
        ([1, 1, 1, 1], {8}),
    ],
)
def test_bad_words_of_several_tokens_ban_what_would_complete_them(history: list[int], banned: set[int]) -> None:
    bench = _Bench()
    bench.add(0, SamplingParams(), prompt=history, bad_words_ids=[(7, 3), (2, 7, 9), (2, 4), (1, 1, 1, 1, 8)])
    adjusted = bench.adjusted(_logits(1, VOCAB), [0])[0]
    assert set(adjusted.isinf().nonzero().flatten().tolist()) == banned


@pytest.mark.parametrize(("num_outputs", "is_masked"), [(0, True), (2, True), (3, False), (4, False)])
def test_stop_ids_are_masked_until_min_tokens(num_outputs: int, is_masked: bool) -> None:
    bench = _Bench()
    bench.add(0, SamplingParams(min_tokens=3), output=[5] * num_outputs, stop_ids=frozenset({2, 11}))
    bench.add(1, SamplingParams(), stop_ids=frozenset({2}))
    adjusted = bench.adjusted(_logits(2, VOCAB), [0, 1])
    assert adjusted[0].isinf().nonzero().flatten().tolist() == ([2, 11] if is_masked else [])
    assert adjusted[1].isfinite().all()


_TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(_TOKENS, _TOKENS, st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 3)), min_size=1, max_size=4
    )
)
def test_penalties_match_a_naive_loop(rows: list[tuple[list[int], list[int], float, float, float]]) -> None:
    bench = _Bench(vocab_size=10)
    logits = _logits(len(rows), 10, seed=len(rows))
    expected = logits.to(torch.float64)
    for row, (prompt, output, presence, frequency, repetition) in enumerate(rows):
        params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
        bench.add(row, params, prompt, output)
        for token in set(prompt + output):
            value = expected[row, token]
            expected[row, token] = value / repetition if value > 0 else value * repetition
        for token in output:
            expected[row, token] -= frequency
        for token in set(output):
            expected[row, token] -= presence
    adjusted = bench.adjusted(logits, list(range(len(rows))))
    torch.testing.assert_close(adjusted.to(torch.float64), expected, rtol=1e-5, atol=1e-5)


def test_extreme_parameters_leave_finite_logits() -> None:
    bench = _Bench()
    bench.add(0, SamplingParams(repetition_penalty=1e300, temperature=1e300), prompt=[0, 1, 2])
    bench.add(1, SamplingParams(repetition_penalty=1e-300, temperature=1e-300, top_p=1e-300), prompt=[0, 1, 2])
    adjusted = bench.adjusted(_logits(2, VOCAB), [0, 1])
    assert adjusted.isfinite().all()
    assert bench.op.calls[-1][1].isfinite().all()


def test_rows_without_a_token_are_reported_a10() -> None:
    bench = _Bench()
    bench.add(4, SamplingParams(temperature=0))
    bench.add(5, SamplingParams(allowed_token_ids=[6]), bad_words_ids=[(6,)])
    bench.add(6, SamplingParams(allowed_token_ids=[6, 7]), bad_words_ids=[(6,)])
    logits = _logits(3, VOCAB)
    output = bench.step(logits, [4, 5, 6])
    assert output.invalid_rows == (1,)
    assert int(output.token_ids[0]) == int(logits[0].argmax())
    assert int(output.token_ids[2]) == 7
    assert bench.step(logits[:1], [4]).invalid_rows == ()


def test_remove_and_reuse_leave_nothing_behind() -> None:
    bench = _Bench()
    everything = SamplingParams(
        top_k=2,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=1,
        logit_bias={1: 1},
        allowed_token_ids=[1],
        min_tokens=3,
        logprobs=2,
        bad_words=["x"],
    )
    logits = _logits(1, VOCAB)
    for clean_up in (lambda: bench.sampler.remove(0), lambda: None):
        bench.add(0, everything, stop_ids=frozenset({2}), bad_words_ids=[(4,), (1, 5)])
        assert bench.step(logits, [0]).logprobs is not None
        clean_up()
        bench.add(0, SamplingParams(temperature=0))
        output = bench.step(logits, [0])
        assert bench.op.calls[-1][0] is logits
        assert bench.op.calls[-1][1:5] == (None,) * 4
        assert (output.logprobs, output.invalid_rows) == (None, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    bench = _Bench()
    bench.add(0, SamplingParams(logprobs=5, temperature=3.0, logit_bias={3: 50.0}))
    bench.add(1, SamplingParams(temperature=0))
    bench.add(2, SamplingParams(logprobs=0, temperature=0))
    bench.add(3, SamplingParams(logprobs=VOCAB, temperature=0))
    logits = _logits(4, VOCAB).to(dtype)
    output = bench.step(logits, [0, 1, 2, 3])
    expected = logits.float().log_softmax(dim=-1)
    assert output.logprobs is not None
    first, second, third, fourth = output.logprobs
    assert first is not None
    assert third is not None
    assert fourth is not None
    assert second is None
    assert int(output.token_ids[0]) == 3
    assert 3 in first
    assert 5 <= len(first) <= 6
    for row, entries in ((0, first), (2, third), (3, fourth)):
        order = sorted(range(VOCAB), key=lambda i: (-float(expected[row, i]), i))
        for token_id, (logprob, rank) in entries.items():
            assert logprob == pytest.approx(float(expected[row, token_id]), abs=1e-6)
            assert order[rank - 1] == token_id
        values = [logprob for logprob, _ in list(entries.values())[:5]]
        assert values == sorted(values, reverse=True)
    assert list(third) == [int(output.token_ids[2])]
    assert next(iter(fourth)) == int(output.token_ids[3])
    assert len(fourth) == VOCAB


def test_greedy_token_has_rank_one_even_among_equals_a17() -> None:
    bench = _Bench()
    bench.add(0, SamplingParams(temperature=0, logprobs=5))
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 20, 30]] = 4.0
    output = bench.step(logits, [0])
    assert output.logprobs is not None
    assert output.logprobs[0] is not None
    assert list(output.logprobs[0]) == [9, 20, 30, 0, 1]
    assert [rank for _, rank in output.logprobs[0].values()] == [1, 2, 3, 4, 5]


def test_prompt_logprobs() -> None:
    bench = _Bench()
    logits, next_ids = _logits(6, VOCAB), torch.tensor([0, 5, 36, 1, 1, 2])
    expected = logits.log_softmax(dim=-1)
    for k in (0, 1, 3):
        found = bench.sampler.prompt_logprobs(logits, next_ids, k)
        assert len(found) == 6
        for row, entries in enumerate(found):
            token_id = int(next_ids[row])
            assert entries[token_id][0] == pytest.approx(float(expected[row, token_id]), abs=1e-6)
            assert entries[token_id][1] == int((expected[row] > expected[row, token_id]).sum()) + 1
            assert list(entries)[:k] == expected[row].topk(k).indices.tolist()
            assert len(entries) in (k, k + 1)
