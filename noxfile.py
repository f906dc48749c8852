"""Checks, tests, and the conformance kit on every platform.

`nox -l` lists the sessions. `nox -t hosted` runs the kit wherever no special hardware is needed and prints the matrix.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import nox

nox.options.sessions = ("lint", "tests")

KIT = ("-c", "constraints/cpu.txt", ".[conformance]")
XPU_CPU = ("--no-deps", "-r", "constraints/xpu-cpu.txt", ".")
TPU_CPU = ("--no-deps", "-r", "constraints/tpu-cpu.txt", ".")
TPU_AOT = ("--no-deps", "-r", "constraints/tpu-aot.txt", ".")
REPORTS = Path("reports")
SUPPORT = Path("docs", "support")
FROM_SOURCE = {"PYTHONPATH": "engine"}
"""For modules that need neither torch nor an installation."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the kit: the session `conformance(<session>)`. All that differs between platforms is here.

    execution: what really runs the kernels.  required: the level without which the session fails.
    requirements: of pip.  environ: added to the environment of the kit.  options: of certify.
    """

    session: str
    platform: str
    execution: str
    required: str
    requirements: tuple[str, ...] = KIT
    environ: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


# What stands in for a device must not be measured on a real one that happens to be here.
NO_CUDA = {"CUDA_VISIBLE_DEVICES": ""}
NO_ROCM = {"ROCR_VISIBLE_DEVICES": ""}
NO_XPU = {"ZE_AFFINITY_MASK": ""}
NO_TPU = {"PJRT_DEVICE": "CPU"}
XLA_CPU = {
    "ISTHMUS_TPU_ON_CPU": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "XLA_COMPILATION_CACHE_SIZE": "128",
}
"""Programs run for milliseconds: better machine code is not worth the seconds of making it. And the kit makes more of
them than a process may have memory maps for, if it keeps them all.
"""

HOSTED = (
    Row("cpu", "cpu", "hardware", "full"),
    Row("null", "null", "stand-in", "boots"),
    Row("toy", "toy", "stand-in", "correct", (*KIT, "./examples/isthmus_toy")),
    Row("cuda-interpret", "cuda", "interpreter", "none", environ=NO_CUDA),
    Row("cuda-aot", "cuda", "aot", "none", environ=NO_CUDA),
    Row("rocm-interpret", "rocm", "interpreter", "none", environ=NO_ROCM),
    Row("rocm-aot", "rocm", "aot", "none", environ=NO_ROCM),
    Row("xpu-probe", "xpu", "host", "none", environ=NO_XPU),
    Row("xpu-cpu", "cpu", "host", "correct", XPU_CPU, NO_XPU, ("--attention-backend", "ipex")),
    Row("tpu-probe", "tpu", "host", "none", environ=NO_TPU),
    Row("tpu-cpu", "tpu", "host", "correct", TPU_CPU, XLA_CPU),
)
"""Run anywhere."""
DEVICES = (
    Row("cuda", "cuda", "hardware", "boots", (".[cuda,conformance]",)),
    Row("rocm", "rocm", "hardware", "boots", (".[rocm,conformance]",)),
    Row("xpu", "xpu", "hardware", "boots", (".[xpu,conformance]",)),
    Row("tpu", "tpu", "hardware", "boots", (".[tpu,conformance]",)),
)
"""Need the device, and an index with torch built for it."""


def environment(session: nox.Session, requirements: tuple[str, ...]) -> Path:
    """The `bin` of an environment with these requirements. Sessions that ask for the same share it.

    Torch takes 1 GB. The environment is made when it is missing; isthmus itself is installed anew each time. With a
    list of all its packages (`-r`), it is another environment when the list changes, and stand-ins take the place of
    the CUDA libraries that the listed torch may be linked against.
    """
    lists = [Path(name) for option, name in itertools.pairwise(requirements) if option == "-r"]
    made_from = (sys.version, *requirements, *(path.read_text() for path in lists))
    digest = hashlib.sha256("\n".join(made_from).encode()).hexdigest()
    bin_directory = session.cache_dir / f"env-{digest[:8]}" / "bin"
    if not (bin_directory / "pip").exists():
        session.run(sys.executable, "-m", "venv", str(bin_directory.parent))
    for leftover in (Path("build"), *Path("examples").glob("*/build")):
        shutil.rmtree(leftover, ignore_errors=True)  # what an older tree put there would go into the wheel
    session.run(str(bin_directory / "pip"), "install", "-qq", *requirements)
    if lists:
        session.run(sys.executable, "tests/environments/cuda_stand_ins.py", str(bin_directory / "python"))
    return bin_directory


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Style, types, import contracts."""
    session.run("make", "check")


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Every test."""
    session.run("make", "test")


@nox.session(python=False)
def packaging(session: nox.Session) -> None:
    """The wheel and the packages of strangers, in fresh environments."""
    session.run("make", "test", "TESTS=tests/packaging")


@nox.session(python=False, name="kit-faults")
def kit_faults(session: nox.Session) -> None:
    """The kit on platforms with one planted fault each: every one must be found, in the right area."""
    session.run("make", "test", "TESTS=tests/faults")


@nox.session(python=False, name="xpu-tests")
def xpu_tests(session: nox.Session) -> None:
    """The tests of IPEX's kernels, which need the environment of `conformance(xpu-cpu)`."""
    python = environment(session, XPU_CPU) / "python"
    session.run(str(python), "-m", "pytest", "tests/xpu", *session.posargs)


@nox.session(python=False, name="tpu-tests")
def tpu_tests(session: nox.Session) -> None:
    """The tests of XLA's programs, which need the environment of `conformance(tpu-cpu)`."""
    python = environment(session, TPU_CPU) / "python"
    session.run(str(python), "-m", "pytest", "tests/tpu", *session.posargs, env=XLA_CPU)


@nox.session(python=False)
def soak(session: nox.Session) -> None:
    """A million requests through the scheduler; nothing may be left of them."""
    session.run(".venv/bin/python", "benchmarks/soak.py", *session.posargs)


@nox.session(python=False)
@nox.parametrize(
    "row",
    [
        *(nox.param(row, id=row.session, tags=["hosted"]) for row in HOSTED),
        *(nox.param(row, id=row.session, tags=["device"]) for row in DEVICES),
    ],
)
def conformance(session: nox.Session, row: Row) -> None:
    """The kit on one platform. The report goes to reports/<session>; arguments after -- to `certify`."""
    out = REPORTS / row.session
    shutil.rmtree(out, ignore_errors=True)
    isthmus = environment(session, row.requirements) / "isthmus"
    options = ["--require", row.required, "--execution", row.execution, *row.options, "--out", str(out)]
    session.run(str(isthmus), "platforms", "certify", row.platform, *options, *session.posargs, env=row.environ)


@nox.session(python=False, name="conformance(tpu-aot)")
def tpu_aot(session: nox.Session) -> None:
    """The TPU compiler on the kernel and on an 8B model's programs, without a TPU. The table goes to reports/tpu-aot;
    arguments after -- (such as `--layers 2`) to what writes it.
    """
    python = str(environment(session, TPU_AOT) / "python")
    session.run(python, "-m", "pytest", "tests/tpu_aot", env={"ISTHMUS_TPU_AOT": "1"})
    out = str(REPORTS / "tpu-aot")
    session.run(python, "-m", "tpu_aot.write_programs", out, *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session(python=False, tags=["hosted"])
def matrix(session: nox.Session) -> None:
    """Print what the hosted sessions reached; fails if one did not reach what it must."""
    rows = [f"{row.session}={row.required}" for row in HOSTED]
    session.run(sys.executable, "-m", "isthmus.conformance.matrix", str(REPORTS), *rows, env=FROM_SOURCE)


@nox.session(python=False, name="support-reports")
def support_reports(session: nox.Session) -> None:
    """Keep the reports of the last runs as docs/support/<session>.json, then write the support page."""
    SUPPORT.mkdir(exist_ok=True)
    for report in sorted(REPORTS.glob("*/conformance-*.json")):
        shutil.copy(report, SUPPORT / f"{report.parent.name}.json")
    support_table(session)


@nox.session(python=False, name="support-table")
def support_table(session: nox.Session) -> None:
    """Write docs/support.md from docs/support/*.json."""
    arguments = [str(SUPPORT), "docs/support.md"]
    session.run(sys.executable, "-m", "isthmus.conformance.support", *arguments, env=FROM_SOURCE)
