"""Area "ops": every provider of every op against native on the host, every linear backend against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from isthmus.conformance.compare import assert_close, assert_equal, name_of
from isthmus.conformance.op_inputs import Arguments, op_inputs, strided_rows
from isthmus.conformance.plugin import is_thin, target_of
from isthmus.conformance.target import Target
from isthmus.ops.registry import NATIVE, Op, OpFn
from isthmus.platforms import LinearBackend, LinearSpec

HOST = torch.device("cpu")
LINEAR_SHAPES = ((1, 1), (65, 33), (1000, 1), (576, 1536), (4096, 256))
"""(in_features, out_features): the smallest, odd ones, a small model's, and a sum long enough to show its precision."""
LINEAR_ROWS = (0, 1, 2, 7, 33, 256)
MANY_ROWS = 1031
"""Of a long prompt: not a multiple of any tile."""
LINEAR_TOLERANCES = MappingProxyType(
    {torch.float32: (1e-5, 2e-5), torch.float16: (1e-3, 4e-3), torch.bfloat16: (8e-3, 3.2e-2)}
)
"""(rtol, atol) where weights are scaled by 1 / sqrt(in_features), so that results are near 1 whatever the width.

rtol: one rounding to the dtype. atol in half precision: four more, for partial sums that are rounded before the last
addition; a running sum in half precision is wrong by some 13 roundings at 4096. atol in float32: room for the slowest
order of summation, and too little for products of operands that were cut to 11 bits (about 2e-4).
"""


@dataclass(frozen=True, slots=True)
class OpCase:
    """One provider and one of the inputs of its op: the `index`-th of `op_inputs`."""

    op: str
    provider: str
    dtype: torch.dtype
    index: int
    inputs: str

    def __str__(self) -> str:
        return f"{self.op}-{self.provider}-{name_of(self.dtype)}-{self.inputs}"


@dataclass(frozen=True, slots=True)
class LinearCase:
    """One backend and a spec that it accepts."""

    backend: str
    spec: LinearSpec

    def __str__(self) -> str:
        s = self.spec
        return f"{self.backend}-{name_of(s.dtype)}-{s.in_features}to{s.out_features}"


def op_cases(target: Target, *, thin: bool = False) -> list[OpCase]:
    """Every op, provider, dtype of the device for which the op has tolerances, and input.

    thin: an op that is exact in all dtypes, because its numbers are float32 or integers whatever the dtype, in one.
    """
    return [
        OpCase(op.name, provider, dtype, index, name)
        for op in target.registry.ops.values()
        for provider in target.registry.providers(op.name)
        for dtype in (target.dtypes[:1] if thin and is_exact(op) else target.dtypes)
        if dtype in op.tolerances
        for index, (name, _) in enumerate(op_inputs(op, HOST, dtype))
    ]


def is_exact(op: Op) -> bool:
    return not any(any(tolerance) for tolerance in op.tolerances.values())


def linear_specs(target: Target) -> list[LinearSpec]:
    """What linear backends are asked for."""
    return [
        LinearSpec(in_features, out_features, dtype)
        for dtype in target.dtypes
        if dtype in LINEAR_TOLERANCES
        for in_features, out_features in LINEAR_SHAPES
    ]


def linear_cases(target: Target) -> list[LinearCase]:
    """Every backend with every spec that it accepts."""
    return [
        LinearCase(name, spec)
        for name, backend in target.linear_backends.items()
        for spec in linear_specs(target)
        if backend.unsupported_reason(spec, target.info) is None
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    target = target_of(metafunc.config)
    if "op_case" in metafunc.fixturenames:
        metafunc.parametrize("op_case", op_cases(target, thin=is_thin(metafunc.config)), ids=str)
    if "op_provider" in metafunc.fixturenames:
        pairs = [(op, provider) for op in target.registry.ops for provider in target.registry.providers(op)]
        metafunc.parametrize("op_provider", pairs, ids="-".join)
    if "linear_case" in metafunc.fixturenames:
        metafunc.parametrize("linear_case", linear_cases(target), ids=str)
    if "linear_backend" in metafunc.fixturenames:
        metafunc.parametrize("linear_backend", target.linear_backends)
    if "sampler" in metafunc.fixturenames:
        metafunc.parametrize("sampler", target.registry.providers("sample"))


@pytest.fixture(autouse=True)
def inference_mode(target: Target) -> Iterator[None]:
    """As the engine runs."""
    with target.platform.inference_mode():
        yield


def host_copies(arguments: Arguments) -> Arguments:
    """The arguments with their tensors copied to the host."""
    return tuple(value.to(HOST, copy=True) if isinstance(value, torch.Tensor) else value for value in arguments)


def results_of(function: OpFn, arguments: Arguments) -> Sequence[torch.Tensor]:
    """What an op returns, as a sequence."""
    results = function(*arguments)
    return (results,) if isinstance(results, torch.Tensor) else results


def assert_unchanged(arguments: Arguments, before: Arguments, *, what: str) -> None:
    for place, (value, was) in enumerate(zip(arguments, before, strict=True)):
        if isinstance(value, torch.Tensor):
            assert_equal(value, was, what=f"{what}: argument {place}")


def skip_refused_native(target: Target, op: str, provider: str) -> None:
    """The engine refuses this one, for a reason of the platform's."""
    reason = target.platform.refused_native.get(op)
    if provider == NATIVE and reason is not None:
        pytest.skip(f"native {op} is refused: {reason}")


def test_an_op_equals_native(target: Target, op_case: OpCase) -> None:
    skip_refused_native(target, op_case.op, op_case.provider)
    op = target.registry.ops[op_case.op]
    function = target.registry.providers(op.name)[op_case.provider]
    _, arguments = next(islice(op_inputs(op, target.device, op_case.dtype), op_case.index, None))
    before = host_copies(arguments)
    results = results_of(function, arguments)
    target.synchronize()
    assert_unchanged(arguments, before, what=f"{op_case} changes its input")
    expected = results_of(op.native, host_copies(before))
    assert len(results) == len(expected), f"{op_case}: {len(results)} results, expected {len(expected)}"
    where = next(value.device for value in arguments if isinstance(value, torch.Tensor))
    rtol, atol = op.tolerances[op_case.dtype]
    for place, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert_close(result, wanted, rtol=rtol, atol=atol, what=f"{op_case}: result {place}")
        assert result.device == where, f"{op_case}: result {place} is on {result.device}, the arguments are on {where}"


def test_the_results_are_the_callers_own(target: Target, op_provider: tuple[str, str]) -> None:
    """Layers keep results while the op runs again, and inputs after it: no provider may share their memory."""
    skip_refused_native(target, *op_provider)
    op, provider = target.registry.ops[op_provider[0]], op_provider[1]
    function = target.registry.providers(op.name)[provider]
    dtype = next(dtype for dtype in target.dtypes if dtype in op.tolerances)
    for name, arguments in op_inputs(op, target.device, dtype):
        what = f"{op.name}-{provider}-{name_of(dtype)}-{name}"
        before = host_copies(arguments)
        results = results_of(function, arguments)
        first = [result.to(HOST, copy=True) for result in results]
        for result in results_of(function, arguments):
            result.fill_(7)
        for place, (result, was) in enumerate(zip(results, first, strict=True)):
            assert_equal(result, was, what=f"{what}: result {place} after those of a second call were overwritten")
            result.fill_(7)
        assert_unchanged(arguments, before, what=f"{what} after its results were overwritten")


def sampling_rows(num_rows: int, vocab_size: int) -> Arguments:
    """Arguments of `sample` on the host, every row with another mixture of parameters."""
    generator = torch.Generator().manual_seed(4)

    def pick(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (num_rows,), generator=generator)]

    return (
        torch.randn(num_rows, vocab_size, generator=generator) * 2,
        pick([0.0, 0.5, 1.0, 2.0], torch.float32),
        pick([0, 1, 7, 300, vocab_size], torch.int64),
        pick([1.0, 0.9, 0.3], torch.float32),
        pick([0.0, 0.05], torch.float32),
        torch.arange(num_rows) * 7919,
    )


def test_a_sampled_token_depends_on_its_own_row_alone(target: Target, sampler: str) -> None:
    skip_refused_native(target, "sample", sampler)
    function = target.registry.providers("sample")[sampler]
    rows = sampling_rows(24, 1031)
    together = function(*(column.to(target.device) for column in rows)).cpu()
    for size in (1, 2, 5, 13, 24):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(size))[:size]
        apart = function(*(column[order].to(target.device) for column in rows)).cpu()
        assert_equal(apart, together[order], what=f"tokens of rows {order.tolist()} in a batch of {size}, against 24")


def test_sampled_tokens_follow_the_probabilities(target: Target, sampler: str) -> None:
    """Over many seeds: mean of chi-square is the degrees of freedom, its standard deviation sqrt(2 * that)."""
    skip_refused_native(target, "sample", sampler)
    function = target.registry.providers("sample")[sampler]
    num_rows, vocab_size = 4096, 16
    logits = torch.linspace(-1.5, 1.5, vocab_size)
    tokens = function(
        logits.expand(num_rows, -1).contiguous().to(target.device),
        torch.ones(num_rows).to(target.device),
        None,
        None,
        None,
        torch.arange(num_rows).to(target.device),
    ).cpu()
    counts, expected = torch.bincount(tokens, minlength=vocab_size), num_rows * logits.softmax(0)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    limit = vocab_size - 1 + 5 * (2 * (vocab_size - 1)) ** 0.5
    assert chi_square <= limit, (
        f"{num_rows} rows of equal logits with seeds 0, 1, 2, ...: drawn {counts.tolist()}, "
        f"expected about {[round(float(value)) for value in expected]}; chi-square {chi_square:.1f} > {limit:.1f}"
    )


def linear_arguments(spec: LinearSpec, rows: int, *, bias: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(x, weight, bias) on the host."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(spec.out_features, spec.in_features, generator=generator) * spec.in_features**-0.5
    x = torch.randn(rows, spec.in_features, generator=generator)
    offset = torch.randn(spec.out_features, generator=generator).to(spec.dtype) if bias else None
    return x.to(spec.dtype), weight.to(spec.dtype), offset


def linear_oracle(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In float64 on the host, rounded once."""
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(weight.dtype)


def packed_weight(backend: LinearBackend, weight: torch.Tensor, target: Target) -> Any:
    """The backend's form of a weight [out, in] of the host. The copy on the device is gone when this returns."""
    there = weight.to(target.device, copy=True)
    packed = backend.pack(there)
    assert_equal(there, weight, what=f"the weight after {backend.name}.pack (an embedding may share it)")
    return packed


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", LINEAR_ROWS, ids="{}rows".format)
def test_a_linear_layer_equals_float64(target: Target, linear_case: LinearCase, rows: int, bias: bool) -> None:
    x, weight, offset = linear_arguments(linear_case.spec, rows, bias=bias)
    backend = target.linear_backends[linear_case.backend](linear_case.spec)
    packed = packed_weight(backend, weight, target)
    arguments = (x.to(target.device, copy=True), None if offset is None else offset.to(target.device, copy=True))
    result = backend.apply(arguments[0], packed, arguments[1])
    again = backend.apply(arguments[0] + 1, packed, arguments[1])
    target.synchronize()
    what = f"{linear_case}, {rows} rows{' with bias' if bias else ''}"
    rtol, atol = LINEAR_TOLERANCES[linear_case.spec.dtype]
    assert_close(result, linear_oracle(x, weight, offset), rtol=rtol, atol=atol, what=what)
    assert_unchanged(arguments, (x, offset), what=f"{what} changes its input")
    assert_close(again, linear_oracle(x + 1, weight, offset), rtol=rtol, atol=2 * atol, what=f"{what}, a second call")


def test_a_linear_layer_takes_strided_rows(target: Target, linear_case: LinearCase) -> None:
    x, weight, _ = linear_arguments(linear_case.spec, 7, bias=False)
    backend = target.linear_backends[linear_case.backend](linear_case.spec)
    packed = packed_weight(backend, weight, target)
    rtol, atol = LINEAR_TOLERANCES[linear_case.spec.dtype]
    result = backend.apply(strided_rows(x, target.device), packed, None)
    assert_close(result, linear_oracle(x, weight, None), rtol=rtol, atol=atol, what=f"{linear_case}, strided rows")


def test_a_linear_layer_takes_many_rows(target: Target, linear_case: LinearCase) -> None:
    x, weight, _ = linear_arguments(linear_case.spec, MANY_ROWS, bias=False)
    backend = target.linear_backends[linear_case.backend](linear_case.spec)
    result = backend.apply(x.to(target.device), packed_weight(backend, weight, target), None)
    rtol, atol = LINEAR_TOLERANCES[linear_case.spec.dtype]
    assert_close(result, linear_oracle(x, weight, None), rtol=rtol, atol=atol, what=f"{linear_case}, {MANY_ROWS} rows")


def test_a_linear_backend_serves_several_weights(target: Target, linear_case: LinearCase) -> None:
    """One instance a spec: the layers of that spec share it."""
    x, weight, _ = linear_arguments(linear_case.spec, 7, bias=False)
    backend = target.linear_backends[linear_case.backend](linear_case.spec)
    weights = [weight, weight.flip(0) * 0.5, -weight]
    packed = [packed_weight(backend, one, target) for one in weights]
    rtol, atol = LINEAR_TOLERANCES[linear_case.spec.dtype]
    for place in (0, 2, 1):
        result = backend.apply(x.to(target.device), packed[place], None)
        what = f"{linear_case}, weight {place} of 3 that were packed one after the other"
        assert_close(result, linear_oracle(x, weights[place], None), rtol=rtol, atol=atol, what=what)


def test_a_linear_backend_says_what_it_declines(target: Target, linear_backend: str, record_property: Any) -> None:
    """What is declined is a fact, not a loss of claim: see ADR 0014."""
    backend = target.linear_backends[linear_backend]
    specs = linear_specs(target)
    reasons = {spec: backend.unsupported_reason(spec, target.info) for spec in specs}
    wrong = {spec: reason for spec, reason in reasons.items() if reason is not None and not is_a_reason(reason)}
    assert wrong == {}, f"{linear_backend}: a reason is one line of words for the user, got {wrong}"
    declined = dict.fromkeys(f"{name_of(spec.dtype)}: {reason}" for spec, reason in reasons.items() if reason)
    if declined:
        count = sum(reason is not None for reason in reasons.values())
        record_property(f"declined by {linear_backend}", f"{'; '.join(declined)} ({count} of {len(specs)} asked)")


def is_a_reason(text: object) -> bool:
    return isinstance(text, str) and text.strip() == text != "" and "\n" not in text
