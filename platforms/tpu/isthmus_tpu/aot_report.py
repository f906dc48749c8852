"""The table of compiled programs: as JSON to compare, as a page to read. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from isthmus_tpu.aot_figures import CompiledProgram
from isthmus_tpu.aot_topology import GIB, MIB, chip

SCHEMA = 1
INTRODUCTION = """\
# Programs of the tpu platform, compiled without a TPU

{subject}.
Compiled by libtpu's own compiler on a machine that has no TPU
({versions}).
What it checks is real: the tiling and layouts of kernels, memory, aliasing. What only a run can show, results on the
device and speed, it does not.

HBM is all that is resident: arguments, results, temporaries, code, and what the engine holds besides (weights
of the other programs, the KV pool). "Aliased" counts the buffers of the KV cache that are updated in place; the session
fails if one is not, or if a program copies one within itself. Compile times are of a busy machine with two cores.
Written by `tests/tpu_aot/write_programs.py`, which `nox -s "conformance(tpu-aot)"` runs.
"""
COLUMNS = (
    "chip",
    "program",
    "compile, s",
    "HBM, GiB",
    "of",
    "temporaries, MiB",
    "Pallas calls",
    "VMEM of one, MiB",
    "of",
    "aliased",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. what: the program's sizes, in words.  resident: bytes of HBM that the engine holds besides it."""

    program: CompiledProgram
    what: str
    resident: int

    def problems(self) -> list[str]:
        return self.program.problems(chip(self.program.chip), resident=self.resident)


@dataclass(frozen=True, slots=True)
class Table:
    """subject: the model, in words.  versions: distribution -> version."""

    subject: str
    versions: Mapping[str, str]
    entries: tuple[Entry, ...]

    def to_json(self) -> str:
        """All sizes in bytes."""
        lines = [
            {"what": entry.what, **asdict(entry.program), "resident": entry.resident, "problems": entry.problems()}
            for entry in self.entries
        ]
        fields = {"schema": SCHEMA, "subject": self.subject, "versions": dict(self.versions), "programs": lines}
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Table:
        """What `to_json` wrote. Raises ValueError for another schema."""
        fields = json.loads(text)
        if fields["schema"] != SCHEMA:
            raise ValueError(f"schema is {fields['schema']!r}, this version reads {SCHEMA}; write the table again")
        return cls(fields["subject"], fields["versions"], tuple(_entry(line) for line in fields["programs"]))

    def to_markdown(self) -> str:
        """The same for people: a row a program, then what each of them is."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_cells, self.entries)]
        programs = {entry.program.name: entry.what for entry in self.entries}
        return "\n".join(
            [
                INTRODUCTION.format(subject=self.subject, versions=versions),
                *(f"| {' | '.join(row)} |" for row in rows),
                "",
                *(f"- **{name}**: {what}" for name, what in programs.items()),
                "",
            ]
        )


def _entry(line: dict[str, object]) -> Entry:
    names = CompiledProgram.__dataclass_fields__
    program = CompiledProgram(**{name: line[name] for name in names})  # type: ignore[arg-type]
    return Entry(program, str(line["what"]), int(str(line["resident"])))


def _cells(entry: Entry) -> tuple[str, ...]:
    program, target = entry.program, chip(entry.program.chip)
    return (
        target.name,
        program.name,
        f"{program.compile_seconds:.0f}",
        f"{(program.hbm + entry.resident) / GIB:.2f}",
        f"{target.hbm_bytes / GIB:.2f}",
        f"{program.temporaries / MIB:.0f}",
        str(program.kernels),
        f"{program.kernel_vmem / MIB:.1f}",
        f"{target.vmem_bytes / MIB:.0f}",
        f"{program.num_aliased} of {program.num_donated}",
    )
