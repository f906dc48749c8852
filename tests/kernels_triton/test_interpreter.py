"""Triton's interpreter: what we correct, and word from upstream when a correction is no longer needed.

Each question is put to a process of its own: a correction holds for the whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from isthmus.ops.triton import INTERPRET, is_interpreting, unavailable_reason

if (missing := unavailable_reason(interpreted=True, environ={INTERPRET: "1"})) is not None:
    pytest.skip(missing, allow_module_level=True)

CHECKS = Path(__file__).with_name("interpreter_checks.py")
NAMES = (
    "bfloat16 sum",
    "bfloat16 times a constant",
    "bfloat16 comparison",
    "bfloat16 product",
    "float32 to bfloat16",
    "integers to bfloat16",
    "float32 to float8_e4m3fn",
    "float32 to float8_e4m3fnuz",
    "float32 to float8_e5m2",
    "float32 to float8_e5m2fnuz",
    "float8_e4m3fn to float32",
    "float8_e4m3fnuz to float32",
    "float8_e5m2 to float32",
    "float8_e5m2fnuz to float32",
)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A Python process without this one's own settings of Triton."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, *arguments], env={**kept, **environ}, capture_output=True, text=True, check=False
    )


@cache
def answers(mode: str, **environ: str) -> dict[str, bool]:
    done = run(str(CHECKS), mode, TRITON_INTERPRET="1", **environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, bool] = json.loads(done.stdout)
    return found


def test_every_check_is_asked() -> None:
    assert tuple(answers("corrected")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_is_right_after_the_correction(name: str) -> None:
    assert answers("corrected")[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_canary_still_sings(name: str) -> None:
    assert not answers("stock")[name], f"upstream now does {name!r} right: drop that part of our correction"


@pytest.mark.parametrize("name", ["overflow", "load behind the end", "load before the start", "no false alarm"])
def test_with_triton_debug_it_finds_what_a_device_does_in_silence(name: str) -> None:
    assert answers("checking", TRITON_DEBUG="1")[name]


def test_without_triton_debug_it_looks_for_nothing() -> None:
    assert not answers("checking")["overflow"]


def test_it_is_refused_where_kernels_are_compiled() -> None:
    done = run("-c", "from isthmus.ops.triton import interpreter; interpreter.install()")
    assert "KernelError: Triton does not interpret kernels in this process; set TRITON_INTERPRET=1" in done.stderr


def test_it_is_refused_where_a_kernel_was_imported_before() -> None:
    program = (
        "import os, isthmus.ops.triton.kernels.norm; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from isthmus.ops.triton import interpreter; interpreter.install()"
    )
    assert (
        "KernelError: isthmus.ops.triton.kernels.norm was imported before TRITON_INTERPRET=1"
        in run("-c", program).stderr
    )


def test_twice_is_once() -> None:
    program = (
        "from isthmus.ops.triton import interpreter; from triton.runtime import interpreter as stock\n"
        "interpreter.install(); first = vars(stock).copy(); interpreter.install(); assert first == vars(stock)"
    )
    done = run("-c", program, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", ["1", "true", "ON", "yes", "0", "false", "", "2"])
def test_the_variable_is_read_as_triton_reads_it(value: str) -> None:
    program = "import triton; print(triton.knobs.runtime.interpret)"
    assert run("-c", program, TRITON_INTERPRET=value).stdout.strip() == str(is_interpreting({INTERPRET: value}))
