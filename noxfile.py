"""Checks, tests, and the conformance kit on every platform.

`nox -l` lists the sessions. `nox -t hosted` runs the kit wherever no special hardware is needed and prints the matrix.
"""

from __future__ import annotations

import hashlib
import itertools
import os
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
TRITON = ("-c", "constraints/cpu.txt", ".[cuda,rocm,conformance]")
NEWEST_TRITON = ("torch==2.13.0", "triton", ".[conformance]")
"""Without the pins: in an environment that has no Triton yet, pip takes the newest."""
REPORTS = Path("reports")
SUPPORT = Path("docs", "support")
FIGURES = SUPPORT / "kernels" / "figures.json"
"""Of the kernels that are compiled ahead of time; the page that is made of them has the name of the folder."""
MUTATION = (
    "mutmut==3.8.1",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "hypothesis>=6.120",
    "pluggy>=1.6",
    "sortedcontainers>=2.4",
)
"""mutmut, and what the scheduler and its tests import; not isthmus, of which a copy is tested."""
CLIENTS = (
    *("-c", "constraints/cpu.txt", ".[server]"),
    *("pytest>=8.3", "pytest-timeout>=2.3", "httpx>=0.27"),
    *("openai==3.57.0", "langchain-openai==1.7.4", "schemathesis==4.32.5"),
)
"""Pinned, so that what fails is the server. Newer ones are tried by changing these lines."""
BROWSER = ("playwright>=1.49",)
"""It brings a driver, and drives the Chromium that is there."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FROM_SOURCE = {"PYTHONPATH": "engine"}
"""For modules that need neither torch nor an installation."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the kit: the session `conformance(<session>)`. All that differs between platforms is here.

    execution: what really runs the kernels.  required: the level without which the session fails.
    requirements: of pip.  environ: added to the environment of the kit.  options: of certify.  targets: architectures
    that all kernels are compiled for besides, and judged.
    """

    session: str
    platform: str
    execution: str
    required: str
    requirements: tuple[str, ...] = KIT
    environ: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()


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
INTERPRET = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
"""The interpreter has one thread, and tensors are too small for more."""

CUDA_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
ROCM_TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")

HOSTED = (
    Row("cpu", "cpu", "hardware", "full"),
    Row("null", "null", "stand-in", "boots"),
    Row("toy", "toy", "stand-in", "correct", (*KIT, "./examples/isthmus_toy")),
    Row("cuda-interpret", "cuda_interpret", "interpreter", "correct", TRITON, INTERPRET),
    Row("cuda-aot", "cuda", "aot", "none", TRITON, NO_CUDA, targets=CUDA_TARGETS),
    Row("rocm-interpret", "rocm_interpret", "interpreter", "correct", TRITON, INTERPRET),
    Row("rocm-aot", "rocm", "aot", "none", TRITON, NO_ROCM, targets=ROCM_TARGETS),
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


@nox.session(python=False)
def clients(session: nox.Session) -> None:
    """The server driven by the official client, LangChain and schemathesis, in an environment with these."""
    python = environment(session, CLIENTS) / "python"
    session.run(str(python), "-m", "pytest", "tests/clients", *session.posargs)


@nox.session(python=False)
def console(session: nox.Session) -> None:
    """The console in a real Chromium; pictures go to reports/console.

    Installs what is missing: playwright with pip, and, as root on Debian, the browser. ISTHMUS_CHROMIUM may name one.
    """
    if not any(map(shutil.which, CHROMIUM)) and "ISTHMUS_CHROMIUM" not in os.environ:
        if os.geteuid() or not shutil.which("apt-get"):
            session.error("there is no Chromium here: install one, or name it in ISTHMUS_CHROMIUM")
        session.run("apt-get", "update", "-qq")
        session.run("apt-get", "install", "-qq", "--no-install-recommends", "chromium", "fonts-dejavu-core")
    session.run("make", ".venv/.dev")
    session.run(".venv/bin/pip", "install", "-qq", *BROWSER)
    session.run(".venv/bin/python", "-m", "pytest", "tests/console", *session.posargs)


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


@nox.session(python=False, name="triton-tests")
def triton_tests(session: nox.Session) -> None:
    """The tests of the Triton kernels, interpreted. With TRITON_DEBUG=1 also of what a device does in silence."""
    session.run("make", "test", f"TESTS={' '.join(('tests/kernels_triton', *session.posargs))}", env=INTERPRET)


@nox.session(python=False, tags=["nightly"])
def soak(session: nox.Session) -> None:
    """A million requests through the scheduler; nothing may be left of them."""
    session.run("make", ".venv/.dev")
    session.run(".venv/bin/python", "benchmarks/soak.py", *session.posargs)


@nox.session(python=False, tags=["nightly"])
def chaos(session: nox.Session) -> None:
    """500 clients that vanish, dawdle and send rubbish for two minutes; nothing may be left of them."""
    environ = {"ISTHMUS_CHAOS_CLIENTS": "500", "ISTHMUS_CHAOS_SECONDS": "120"}
    session.run("make", "test", "TESTS=tests/chaos", env=environ)


@nox.session(python=False, name="new-cases", tags=["nightly"])
def new_cases(session: nox.Session) -> None:
    """The property tests with cases that nobody has tried; pytest prints the seed."""
    session.run("make", "test", "TESTS=tests/property", env={"ISTHMUS_PROPERTY_CASES": "1000"})


@nox.session(python=False, tags=["nightly"])
def mutation(session: nox.Session) -> None:
    """Change the scheduler in one place at a time: a test must fail, or docs/mutation-survivors.json must say why not.

    Files after -- restrict it: `nox -s mutation -- scheduler/room.py`.
    """
    python = environment(session, MUTATION) / "python"
    session.run(str(python), "tests/mutation/run.py", *session.posargs)


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
    if row.targets:
        compile_kernels(session, isthmus, row.targets, "--report", str(out / f"conformance-{row.platform}.json"))


def compile_kernels(session: nox.Session, isthmus: Path, targets: tuple[str, ...], *options: str) -> None:
    """Every kernel for these architectures: it must pass the gates, and have the figures that were kept."""
    chosen = [argument for target in targets for argument in ("--target", target)]
    # Fusing products and sums is Triton's default up to 3.9, which warns that it will not be from 3.10 on.
    environ = {"TRITON_DEFAULT_FP_FUSION": "1"}
    session.run(str(isthmus), "kernels", "compile", *chosen, "--figures", str(FIGURES), *options, env=environ)


@nox.session(python=False, name="kernels-newest")
def kernels_newest(session: nox.Session) -> None:
    """Every kernel on the newest Triton. Figures of a version that has none yet are kept with: -- --update"""
    isthmus = environment(session, NEWEST_TRITON) / "isthmus"
    compile_kernels(session, isthmus, (*CUDA_TARGETS, *ROCM_TARGETS), *session.posargs)


@nox.session(python=False, name="conformance(tpu-aot)", tags=["nightly"])
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
