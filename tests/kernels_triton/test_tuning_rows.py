"""Launch shapes: which row is found, and that every row is one that its architecture can launch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isthmus.ops.triton import tuning
from isthmus.ops.triton.arch import ARCHS, Arch
from isthmus.ops.triton.tuning import (
    ATTENTION_ROWS,
    DECODE,
    MIN_DOT,
    NARROW,
    PREFILL,
    PREFILL_WS,
    SAFE,
    WIDE,
    AttentionRow,
    attention_row,
    find_row,
)
from isthmus.platforms import AttentionSpec

SPEC = AttentionSpec(32, 8, 128, 64, torch.bfloat16, torch.bfloat16, 0.1)
KINDS = (DECODE, PREFILL)
MAX_THREADS = 1024


def of_table() -> Iterator[tuple[tuple[str, str, int], AttentionRow, Arch]]:
    """Every row with every architecture that it serves."""
    for key, row in ATTENTION_ROWS.items():
        served = [arch for arch in ARCHS.values() if key[0] in (arch.name, arch.family)]
        assert served, f"{key}: no architecture of that name or family"
        yield from ((key, row, arch) for arch in served)


def test_the_architecture_s_own_row_comes_before_its_family_s() -> None:
    gfx90a, gfx942 = ARCHS["gfx90a"], ARCHS["gfx942"]
    assert gfx90a.family == gfx942.family == "gfx9"
    assert find_row(gfx90a, PREFILL, NARROW) is ATTENTION_ROWS["gfx90a", PREFILL, NARROW]
    assert find_row(gfx942, PREFILL, NARROW) is ATTENTION_ROWS["gfx9", PREFILL, NARROW]
    assert find_row(gfx90a, PREFILL, NARROW) != find_row(gfx942, PREFILL, NARROW)


def test_an_architecture_without_rows_gets_the_safe_one() -> None:
    unknown = replace(ARCHS["sm_90"], name="sm_99", family="none")
    for kind in KINDS:
        assert find_row(unknown, kind, NARROW) is None
        assert attention_row(unknown, SPEC, kind) == SAFE


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_has_a_row_for_every_kind(arch: Arch, kind: str) -> None:
    assert find_row(arch, kind, NARROW) is not None
    assert attention_row(arch, SPEC, kind) == find_row(arch, kind, NARROW)


@pytest.mark.parametrize("head_dim", [129, 160, 256])
def test_wide_heads_have_rows_of_their_own(head_dim: int) -> None:
    spec = replace(SPEC, head_dim=head_dim)
    for arch in ARCHS.values():
        for kind in KINDS:
            assert attention_row(arch, spec, kind) == (find_row(arch, kind, WIDE) or SAFE)
    assert attention_row(ARCHS["sm_90"], spec, PREFILL).block_m >= 64


def test_float32_gets_the_safe_shape_on_the_row_s_programs() -> None:
    spec = replace(SPEC, dtype=torch.float32, kv_cache_dtype=torch.float32)
    row = find_row(ARCHS["sm_80"], DECODE, NARROW)
    assert row is not None
    assert row.programs != SAFE.programs
    assert attention_row(ARCHS["sm_80"], spec, DECODE) == replace(SAFE, programs=row.programs)


@pytest.mark.parametrize("group", [1, 3, 16, 17, 100])
def test_a_block_holds_a_whole_group(group: int) -> None:
    spec = replace(SPEC, num_heads=group, num_kv_heads=1)
    for arch in ARCHS.values():
        for kind in KINDS:
            row = attention_row(arch, spec, kind)
            assert row.block_m >= group
            assert row.block_m.bit_count() == 1


@pytest.mark.parametrize(("key", "row", "arch"), list(of_table()), ids=str)
def test_a_row_can_be_launched(key: tuple[str, str, int], row: AttentionRow, arch: Arch) -> None:
    """What the compiler would refuse or a device could not start. Whether it spills, the compile checks say."""
    _, kind, width = key
    for size in (row.block_m, row.tile, row.num_warps):
        assert size.bit_count() == 1
    assert row.block_m >= MIN_DOT
    assert row.tile >= MIN_DOT
    assert row.num_warps * arch.wave_size <= MAX_THREADS
    assert row.programs >= 1
    assert width in (NARROW, WIDE)
    assert kind in (*KINDS, PREFILL_WS)
    assert arch.has_tma or kind != PREFILL_WS
    # Keys and values of one stage, in two bytes: the least that has to fit, whatever the compiler adds to it.
    assert row.num_stages * 2 * row.tile * width * 2 <= arch.shared_bytes


@pytest.mark.parametrize("row", [SAFE, *ATTENTION_ROWS.values()], ids=str)
def test_every_row_says_where_it_comes_from(row: AttentionRow) -> None:
    """Static, which means that it was only compiled, or measured: then on what, and when."""
    origin, _, rest = row.source.partition(": ")
    assert rest
    if origin == "static":
        assert "not measured" in rest
    else:
        assert re.fullmatch(r"measured on .+, \d{4}-\d{2}-\d{2}", origin)


def test_options_that_one_vendor_knows_are_left_out_where_not_set() -> None:
    assert SAFE.options == {"num_warps": 4, "num_stages": 1}
    assert replace(SAFE, waves_per_eu=2).options == {"num_warps": 4, "num_stages": 1, "waves_per_eu": 2}


def test_nothing_is_tuned_while_serving() -> None:
    """Rows cannot change, and no kernel is one that Triton would try several shapes of."""
    with pytest.raises(TypeError):
        ATTENTION_ROWS["sm_90", DECODE, NARROW] = SAFE  # type: ignore[index]
    texts = [path.read_text() for path in Path(tuning.__file__).parent.rglob("*.py")]
    assert len(texts) > 10
    assert [text for text in texts if "autotune" in text] == []
