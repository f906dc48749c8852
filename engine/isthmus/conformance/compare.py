"""Comparisons whose failure says where, by how much, and against which tolerance."""

from __future__ import annotations

import torch


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    rtol: float,
    atol: float,
    what: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Elementwise |actual - expected| <= atol + rtol * |expected|; a NaN is never close.

    dtype: the dtype that `actual` must have; None = that of `expected`. Values are compared in float64 on the host.
    Raises AssertionError with shape, dtype, worst element, both values and the tolerance.
    """
    wanted = expected.dtype if dtype is None else dtype
    if actual.shape != expected.shape or actual.dtype != wanted:
        raise AssertionError(
            f"{what}: got {_kind(actual.shape, actual.dtype)}, expected {_kind(expected.shape, wanted)}"
        )
    if actual.numel() == 0:
        return
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    difference = (got - want).abs()
    # An infinity equal to its expectation differs by NaN from it.
    difference = torch.where(got == want, torch.zeros_like(difference), difference)
    excess = (difference - (atol + rtol * want.abs())).nan_to_num(nan=torch.inf, posinf=torch.inf)
    wrong = excess > 0
    if not bool(wrong.any()):
        return
    worst = tuple(int(index) for index in torch.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{what}\n"
        f"  {_kind(actual.shape, actual.dtype)}: {int(wrong.sum())} of {wrong.numel()} elements out of tolerance\n"
        f"  worst at {list(worst)}: got {got[worst].item():.8g}, expected {want[worst].item():.8g}, "
        f"difference {difference[worst].item():.3g}\n"
        f"  tolerance: rtol {rtol:g}, atol {atol:g}"
    )


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, *, what: str) -> None:
    """Bit for bit, NaNs included."""
    got, want = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    same = got.shape == want.shape and got.dtype == want.dtype
    if same and torch.equal(got.flatten().view(torch.uint8), want.flatten().view(torch.uint8)):
        return
    assert_close(actual, expected, rtol=0.0, atol=0.0, what=f"{what}: must be equal bit for bit")
    raise AssertionError(f"{what}: equal in value, but not bit for bit (-0.0 against 0.0, or NaNs)")


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"shape {tuple(shape)}, dtype {name_of(dtype)}"


def kind_of(device: torch.device) -> str:
    """What a device and its neighbours have in common: "acme" of acme:1."""
    return str(device).partition(":")[0]


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
