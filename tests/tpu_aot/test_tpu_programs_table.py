"""The stored table of compiled programs. Needs no jax."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from isthmus_tpu.aot_figures import CompiledProgram
from isthmus_tpu.aot_report import Entry, Table
from isthmus_tpu.aot_topology import CHIPS

STORED = Path(__file__).parents[2] / "docs" / "support" / "programs"
PROGRAM = CompiledProgram(
    name="decode",
    chip="v5e",
    compile_seconds=1.0,
    arguments=2**30,
    results=2**20,
    donated=2**20,
    num_donated=2,
    aliased=2**20,
    num_aliased=2,
    copies=0,
    temporaries=0,
    code=2**20,
    kernels=1,
    kernel_vmem=2**20,
)


def test_the_stored_table_is_whole_and_without_problems() -> None:
    table = Table.from_json((STORED / "tpu-programs.json").read_text())
    found = [(entry.program.chip, entry.program.name) for entry in table.entries]
    assert found == [(chip.name, name) for chip in CHIPS for name in ("decode", "prefill", "mixed", "head")]
    assert [entry.problems() for entry in table.entries] == [[]] * len(found)
    assert "32 layers" in table.subject


def test_every_step_has_its_kernels_and_aliased_caches() -> None:
    table = Table.from_json((STORED / "tpu-programs.json").read_text())
    steps = [entry.program for entry in table.entries if entry.program.name != "head"]
    assert {(step.kernels, step.num_donated) for step in steps} == {(32, 64)}


def test_the_stored_page_is_made_of_the_stored_table() -> None:
    table = Table.from_json((STORED / "tpu-programs.json").read_text())
    assert (STORED / "tpu-programs.md").read_text() == table.to_markdown()
    assert Table.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"num_aliased": 1},
            "1 buffers of 1048576 bytes are aliased, 2 of 1048576 were donated: the others are copied",
        ),
        ({"copies": 3}, "3 copies of whole donated buffers within the program"),
        ({"temporaries": 2**34}, "takes 18254659584 bytes of HBM, a v5e has 16911433728"),
        ({"kernel_vmem": 2**25}, "a kernel takes 33554432 bytes of VMEM, a v5e gives 16777216"),
    ],
)
def test_a_problem_is_named(change: dict[str, int], problem: str) -> None:
    assert Entry(PROGRAM, "", resident=0).problems() == []
    found = Entry(replace(PROGRAM, **change), "", resident=0).problems()  # type: ignore[arg-type]
    assert len(found) == 1
    assert found[0].startswith(problem)


def test_what_the_engine_holds_besides_counts() -> None:
    assert Entry(PROGRAM, "", resident=2**34).problems() != []


def test_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema is 0, this version reads 1; write the table again"):
        Table.from_json('{"schema": 0}')
