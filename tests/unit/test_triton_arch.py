"""Facts about architectures that the table of facts lacks."""

from __future__ import annotations

import logging

import pytest

from isthmus.ops.triton import facts_of, register_kernels
from isthmus.ops.triton.arch import ARCHS, NO_FAMILY, assumed, relatives
from isthmus.ops.triton.tuning import ATTENTION_ROWS


@pytest.mark.parametrize(
    ("name", "of", "family"),
    [
        ("sm_87", ["sm_80", "sm_86", "sm_89"], "sm8x"),
        ("sm_103", ["sm_100"], "sm10x"),
        ("sm_121", ["sm_120"], "sm12x"),
        ("sm_110", ["sm_100", "sm_120"], NO_FAMILY),
        ("gfx1101", ["gfx1100"], "gfx11"),
        ("gfx941", ["gfx942"], "gfx9"),
        ("gfx1030", ["gfx1100", "gfx1201"], NO_FAMILY),
        ("sm_75", [], None),
        ("npu7", [], None),
    ],
)
def test_relatives_are_the_most_alike(name: str, of: list[str], family: str | None) -> None:
    assert [row.name for row in relatives(name)] == of
    found = assumed(name)
    assert (None if found is None else found.family) == family


def test_assumed_facts_are_the_least_of_the_relatives() -> None:
    found = assumed("sm_87")
    assert found is not None
    assert (found.name, found.shared_bytes, found.multiprocessors) == ("sm_87", 101376, 84)
    assert found.fp8_kv == ("float8_e5m2",)
    for name in ("sm_87", "sm_110", "gfx908", "gfx1030"):
        least, rows = assumed(name), relatives(name)
        assert least is not None
        assert all(least.shared_bytes <= row.shared_bytes and set(least.fp8_kv) <= set(row.fp8_kv) for row in rows)
        assert least.wave_size >= max(row.wave_size for row in rows)


def test_no_family_has_no_rows() -> None:
    assert NO_FAMILY not in {family for family, _, _ in ATTENTION_ROWS} | set(ARCHS)


def test_the_log_says_what_is_assumed(caplog: pytest.LogCaptureFixture) -> None:
    assert facts_of("sm_90") is ARCHS["sm_90"]
    assert caplog.messages == []
    assert facts_of("sm_87") == assumed("sm_87")
    assert caplog.messages == [
        "sm_87 is not in the table of architecture facts: its Triton kernels are launched as the least of sm_80, "
        "sm_86, sm_89 allows, which is right but may be slow; a row in isthmus/ops/triton/arch.py makes it one of its "
        "own"
    ]


def test_without_relatives_the_log_says_that_there_are_no_kernels(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.ops.triton.unavailable_reason", lambda interpreted: None)
    with caplog.at_level(logging.WARNING):
        register_kernels(None, "sm_75")  # type: ignore[arg-type]
    (message,) = caplog.messages
    assert message.startswith(
        "no Triton kernels: no facts about sm_75 or a relative of it; there are some about sm_80,"
    )
