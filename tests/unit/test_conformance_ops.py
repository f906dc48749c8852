"""The kit's area "ops" against kernels that are wrong on purpose: each must be caught, by the input that is for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from isthmus.conformance import test_ops as kit
from isthmus.conformance.op_inputs import op_inputs
from isthmus.conformance.target import Target
from isthmus.ops.sampling import sample
from isthmus.platforms import DeviceInfo, LinearBackend, LinearSpec
from isthmus.plugins.manager import PluginManager

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def target() -> Target:
    return Target.start("cpu", PluginManager.load())


def failures(target: Target, op: str, kernel: Callable[..., Any]) -> dict[str, str]:
    """What the kit says of `kernel` as a provider of `op`: "dtype-inputs" -> message of the failure."""
    target.registry.add_op(op, "planted", kernel)
    found = {}
    for case in kit.op_cases(target):
        if (case.op, case.provider) == (op, "planted"):
            try:
                kit.test_an_op_equals_native(target, case)
            except AssertionError as error:
                found[str(case).removeprefix(f"{op}-planted-")] = str(error)
    return found


def normed(x: torch.Tensor, weight: torch.Tensor, mean_square: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.float() * torch.rsqrt(mean_square.float() + eps)).to(weight.dtype).mul_(weight).to(x.dtype)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return normed(x, weight, x.float().pow(2).mean(-1, keepdim=True), eps)


def norm_with_running_sum_in_its_dtype(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    total = x.new_zeros(x.shape[0], 1)
    for part in x.split(32, dim=1):
        total = total + (part * part).sum(-1, keepdim=True)
    return normed(x, weight, total.float() / x.shape[1], eps)


def norm_with_squares_in_its_dtype(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return normed(x, weight, (x * x).float().mean(-1, keepdim=True), eps)


def norm_with_an_eps_of_its_own(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return norm(x, weight, 1e-6)


def norm_of_packed_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return norm(packed(x), weight, eps)


def packed(x: torch.Tensor) -> torch.Tensor:
    """What a kernel sees that takes every row to follow the one before."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1))


def silu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def silu_of_packed_rows(x: torch.Tensor) -> torch.Tensor:
    return silu(packed(x))


def silu_that_overflows(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * gate.exp() / (1 + gate.exp()) * up).to(x.dtype)


def silu_of_the_other_half(x: torch.Tensor) -> torch.Tensor:
    up, gate = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_with_the_error_function(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate) * up).to(x.dtype)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[Any, ...]:
    return norm(x + residual, weight, eps), x + residual


def add_norm_without_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return norm(x, weight, eps), x + residual


def add_norm_that_loses_the_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return norm(x + residual, weight, eps), residual.clone()


def add_norm_in_place(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return norm(residual.add_(x), weight, eps), residual.clone()


def add_norm_with_one_result(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return norm(x + residual, weight, eps)


def rope(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, *, step: int, sign: int = 1
) -> Any:
    """step: from an element to its partner; rotary_dim / 2 in the neox pairing, 1 in that of gptj."""
    width = table.shape[1]
    cos, sin = table[positions][:, None].chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = x.float()
        if step == 1:
            first, second = turned[..., 0:width:2].clone(), turned[..., 1:width:2].clone()
        else:
            first, second = turned[..., : width // 2].clone(), turned[..., width // 2 : width].clone()
        pair = (first * cos - sign * second * sin, second * cos + sign * first * sin)
        rotated = torch.stack(pair, -1).flatten(-2) if step == 1 else torch.cat(pair, -1)
        return torch.cat((rotated, turned[..., width:]), -1).to(x.dtype)

    return rotate(q), rotate(k)


def rope_neox(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> Any:
    return rope(positions, q, k, table, step=0)


def rope_gptj(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> Any:
    return rope(positions, q, k, table, step=1)


def rope_backwards(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> Any:
    return rope(positions, q, k, table, step=0, sign=-1)


def rope_by_token(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> Any:
    return rope_neox(torch.arange(len(positions)), q, k, table)


def rope_in_place(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> Any:
    return tuple(x.copy_(turned) for x, turned in zip((q, k), rope_neox(positions, q, k, table), strict=True))


def sample_without_seeds(*arguments: Any) -> torch.Tensor:
    return sample(*arguments[:-1], torch.zeros_like(arguments[-1]))


def sample_by_row(*arguments: Any) -> torch.Tensor:
    return sample(*arguments[:-1], arguments[-1] + torch.arange(len(arguments[-1])))


def sample_in_half_precision(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return sample(logits.bfloat16().float(), *arguments)


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("rms_norm", norm),
        ("fused_add_rms_norm", add_norm),
        ("silu_and_mul", silu),
        ("rope", rope_neox),
        ("sample", sample),
    ],
)
def test_a_right_kernel_of_another_make_passes(target: Target, op: str, kernel: Callable[..., Any]) -> None:
    assert failures(target, op, kernel) == {}
    kit.test_the_results_are_the_callers_own(target, (op, "planted"))


@pytest.mark.parametrize(
    ("op", "kernel", "caught_by"),
    [
        ("rms_norm", norm_with_running_sum_in_its_dtype, ["bfloat16-wide-rows", "float16-wide-rows"]),
        ("rms_norm", norm_with_squares_in_its_dtype, ["float16-large-values"]),
        ("rms_norm", norm_with_an_eps_of_its_own, [f"{t}-small-values" for t in ("bfloat16", "float16", "float32")]),
        ("rms_norm", norm_of_packed_rows, [f"{t}-strided-rows" for t in ("bfloat16", "float16", "float32")]),
        ("silu_and_mul", silu_of_packed_rows, ["bfloat16-strided-rows"]),
        ("silu_and_mul", silu_that_overflows, [f"{t}-saturated" for t in ("bfloat16", "float16", "float32")]),
        ("silu_and_mul", silu_of_the_other_half, ["bfloat16-0.1x64"]),
        ("gelu_and_mul", gelu_with_the_error_function, ["float32-2.33x1152"]),
        ("fused_add_rms_norm", add_norm_without_residual, ["bfloat16-0.1x64", "float32-wide-rows"]),
        ("fused_add_rms_norm", add_norm_that_loses_the_sum, ["bfloat16-0.1x64", "float32-large-values"]),
        ("fused_add_rms_norm", add_norm_in_place, ["bfloat16-0.1x64"]),
        ("fused_add_rms_norm", add_norm_with_one_result, ["float32-0.1x64"]),
        ("rope", rope_gptj, ["bfloat16-0.1x4x16", "float16-3.5x2x32", "float32-2.33x9x64"]),
        ("rope", rope_backwards, ["bfloat16-0.1x4x16", "float16-3.5x2x32", "float32-2.33x9x64"]),
        ("rope", rope_by_token, ["float32-2.33x9x64"]),
        ("rope", rope_in_place, ["float32-2.33x9x64"]),
        ("sample", sample_without_seeds, ["float32-consecutive-seeds"]),
        ("sample", sample_by_row, ["float32-consecutive-seeds"]),
        ("sample", sample_in_half_precision, ["float32-consecutive-seeds"]),
    ],
)
def test_a_wrong_kernel_is_caught(target: Target, op: str, kernel: Callable[..., Any], caught_by: list[str]) -> None:
    found = failures(target, op, kernel)
    assert set(caught_by) <= set(found)
    assert all(message.startswith(f"{op}-planted-") for message in found.values())


def test_a_lower_precision_is_caught_by_the_input_for_it_alone(target: Target) -> None:
    """The op's own inputs let it through: without the kit's, nobody would know."""
    assert set(failures(target, "rms_norm", norm_with_squares_in_its_dtype)) == {"float16-large-values"}


def test_a_failure_names_case_place_values_and_tolerance(target: Target) -> None:
    message = failures(target, "silu_and_mul", silu_of_the_other_half)["float32-1.7x18"]
    lines = message.splitlines()
    assert lines[0] == "silu_and_mul-planted-float32-1.7x18: result 0"
    assert lines[1].startswith("  shape (7, 9), dtype float32: 63 of 63 elements out of tolerance")
    assert lines[2].startswith("  worst at [")
    assert lines[3] == "  tolerance: rtol 1e-05, atol 1e-06"


def test_results_in_memory_that_the_caller_does_not_own_are_caught(target: Target) -> None:
    kept: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def into_one_buffer(x: torch.Tensor) -> torch.Tensor:
        result = silu(x)
        return kept.setdefault((result.shape, result.dtype), result).copy_(result)

    assert failures(target, "silu_and_mul", into_one_buffer) == {}
    with pytest.raises(AssertionError, match="result 0 after those of a second call were overwritten"):
        kit.test_the_results_are_the_callers_own(target, ("silu_and_mul", "planted"))


def test_a_sampler_that_sees_its_neighbours_or_its_place_is_caught(target: Target) -> None:
    def by_size(*arguments: Any) -> torch.Tensor:
        return sample(*arguments[:-1], arguments[-1] + len(arguments[-1]))

    for name, kernel in (("by_row", sample_by_row), ("by_size", by_size)):
        target.registry.add_op("sample", name, kernel)
        with pytest.raises(AssertionError, match="tokens of rows"):
            kit.test_a_sampled_token_depends_on_its_own_row_alone(target, name)


def test_a_sampler_with_one_random_number_for_all_seeds_is_caught(target: Target) -> None:
    target.registry.add_op("sample", "planted", sample_without_seeds)
    kit.test_a_sampled_token_depends_on_its_own_row_alone(target, "planted")
    with pytest.raises(AssertionError, match=r"rows of equal logits with seeds 0, 1, 2, .*chi-square"):
        kit.test_sampled_tokens_follow_the_probabilities(target, "planted")


class Planted(LinearBackend):
    """A right backend, for faults to be put into."""

    name = "planted"
    declines: ClassVar[str | None] = None

    @classmethod
    def unsupported_reason(cls, spec: LinearSpec, info: DeviceInfo) -> str | None:
        return cls.declines

    def pack(self, weight: torch.Tensor) -> Any:
        return weight.T.contiguous()

    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        out = (x.float() @ packed.float()) + (0 if bias is None else bias.float())
        return out.to(x.dtype)


class DropsBias(Planted):
    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(x, packed, None)


class AddsInItsDtype(Planted):
    """Sums of 32 products are exact enough; those of the sums are not."""

    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        total = x.new_zeros(x.shape[0], packed.shape[1])
        for some, rows in zip(x.split(32, 1), packed.split(32, 0), strict=True):
            total = total + (some.float() @ rows.float()).to(x.dtype)
        return total if bias is None else total + bias


class MultipliesInTf32(Planted):
    """float32 operands cut to 11 bits, as some devices do unless they are told not to."""

    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dtype == F32:
            x, packed = ((v.view(torch.int32) + 0x1000 & ~0x1FFF).view(F32) for v in (x.contiguous(), packed))
        return super().apply(x, packed, bias)


class ScalesTheWeight(Planted):
    def pack(self, weight: torch.Tensor) -> Any:
        return super().pack(weight.mul_(2)) / 2


class TakesPackedRows(Planted):
    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(torch.as_strided(x, x.shape, (x.shape[1], 1)), packed, bias)


class KeepsItsResult(Planted):
    def pack(self, weight: torch.Tensor) -> Any:
        self._results: dict[torch.Size, torch.Tensor] = {}
        return super().pack(weight)

    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().apply(x, packed, bias)
        return self._results.setdefault(out.shape, out).copy_(out)


class ChangesItsInput(Planted):
    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().apply(x, packed, bias)
        x.zero_()
        return out


class AnswersInFloat32(Planted):
    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(x.float(), packed, bias)


def linear_failures(target: Target, backend: type[LinearBackend]) -> dict[str, str]:
    """What the kit says of `backend`: "dtype-shape-rows" or "dtype-shape-strided" -> message of the failure."""
    target.registry.add_linear(backend)
    found = {}
    for case in kit.linear_cases(target):
        if case.backend != "planted" or case.spec.out_features not in (33, 256):
            continue
        name = str(case).removeprefix("planted-")
        checks: dict[str, Callable[[], None]] = {
            f"{name}-{rows}": lambda rows=rows, case=case: kit.test_a_linear_layer_equals_float64(
                target, case, rows, True
            )
            for rows in (0, 1, 7)
        }
        checks[f"{name}-strided"] = lambda case=case: kit.test_a_linear_layer_takes_strided_rows(target, case)
        for label, check in checks.items():
            try:
                check()
            except AssertionError as error:
                found[label] = str(error)
    return found


def test_a_right_linear_backend_passes(target: Target) -> None:
    assert linear_failures(target, Planted) == {}


@pytest.mark.parametrize(
    ("backend", "caught_by", "text"),
    [
        (DropsBias, ["bfloat16-65to33-1", "float32-4096to256-7"], "elements out of tolerance"),
        (AddsInItsDtype, ["bfloat16-4096to256-7", "float16-4096to256-7"], "elements out of tolerance"),
        (MultipliesInTf32, ["float32-65to33-7", "float32-4096to256-1"], "elements out of tolerance"),
        (ScalesTheWeight, ["bfloat16-65to33-1"], "the weight after planted.pack"),
        (TakesPackedRows, ["bfloat16-65to33-strided"], "strided rows"),
        (KeepsItsResult, ["float32-65to33-7"], "elements out of tolerance"),
        (ChangesItsInput, ["float32-65to33-7"], "changes its input: argument 0"),
        (AnswersInFloat32, ["float16-65to33-7"], "got shape (7, 33), dtype float32, expected"),
    ],
)
def test_a_wrong_linear_backend_is_caught(
    target: Target, backend: type[LinearBackend], caught_by: list[str], text: str
) -> None:
    found = linear_failures(target, backend)
    assert set(caught_by) <= set(found)
    assert all(text in found[label] for label in caught_by)


def test_what_a_linear_backend_declines_is_recorded_and_not_asked(target: Target) -> None:
    class Declining(Planted):
        declines = "no matrix unit"

    target.registry.add_linear(Declining)
    recorded: dict[str, object] = {}
    kit.test_a_linear_backend_says_what_it_declines(target, "planted", recorded.__setitem__)
    assert recorded == {
        "declined by planted": "; ".join(f"{kit.name_of(dtype)}: no matrix unit" for dtype in target.dtypes)
        + " (15 of 15 asked)"
    }
    assert "planted" not in {case.backend for case in kit.linear_cases(target)}


@pytest.mark.parametrize("reason", ["", " no", "no\nnever", 3])
def test_a_reason_without_words_is_caught(target: Target, reason: Any) -> None:
    class Declining(Planted):
        declines = reason

    target.registry.add_linear(Declining)
    with pytest.raises(AssertionError, match="planted: a reason is one line of words for the user"):
        kit.test_a_linear_backend_says_what_it_declines(target, "planted", lambda name, value: None)


def test_inputs_are_the_same_at_every_call_and_named_apart() -> None:
    target = Target.start("cpu", PluginManager.load())
    for op in target.registry.ops.values():
        first, second = (list(op_inputs(op, kit.HOST, BF16)) for _ in range(2))
        names = [name for name, _ in first]
        assert len(set(names)) == len(names)
        assert not any(" " in name for name in names)
        for (name, one), (_, other) in zip(first, second, strict=True):
            kit.assert_unchanged(one, other, what=name)


def test_thin_cases_leave_out_dtypes_of_exact_ops_alone(target: Target) -> None:
    whole, thin = kit.op_cases(target), kit.op_cases(target, thin=True)
    left_out = set(whole) - set(thin)
    assert {(case.op, case.dtype) for case in left_out} == {("sample", dtype) for dtype in target.dtypes[1:]}
    assert set(thin) < set(whole)
