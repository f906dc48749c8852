"""Compiling, in processes of their own: a compiler that dies takes nothing else with it. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from triton import knobs

from isthmus.ops.triton.aot import cubin, hsaco
from isthmus.ops.triton.aot.driver import fake_driver
from isthmus.ops.triton.aot.figures import Built, Figures
from isthmus.ops.triton.aot.record import Variant
from isthmus.ops.triton.arch import ARCHS, Arch

if TYPE_CHECKING:
    from isthmus.ops.triton.aot.jobs import Job

CACHE_DIR = "TRITON_CACHE_DIR"
"""Triton's own environment variable. Others of its are left alone: some are part of a kernel's key in the cache."""

READERS: Mapping[str, Callable[[Any, Arch], Figures]] = MappingProxyType({"cubin": cubin.read, "hsaco": hsaco.read})
"""Kind of binary -> what reads it."""


def build(jobs: Sequence[Job], *, processes: int, cache_dir: Path | None = None) -> list[Built]:
    """Compile all, in that order. cache_dir: Triton's cache; None = its usual one. What is in there is only read."""
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_prepare, initargs=(cache_dir,)) as pool:
        futures = [pool.submit(build_one, job) for job in jobs]
        return [result_of(job, future) for job, future in zip(jobs, futures, strict=True)]


def _prepare(cache_dir: Path | None) -> None:
    if cache_dir is not None:
        os.environ[CACHE_DIR] = str(cache_dir.resolve())


def result_of(job: Job, future: Future[Built]) -> Built:
    try:
        return future.result()
    except BrokenProcessPool:
        error = "the compiler's process died with this one or one beside it; --jobs 1 tells which"
        return Built(job.arch, job.variant.name, job.case, job.matrix, None, error)


def build_one(job: Job) -> Built:
    """In this process."""
    compiled, cpu_s, error = compile_variant(job.variant, ARCHS[job.arch])
    figures = None
    if compiled is not None:
        figures = next(read(compiled, ARCHS[job.arch]) for kind, read in READERS.items() if kind in compiled.asm)
    return Built(job.arch, job.variant.name, job.case, job.matrix, figures, error, cpu_s)


def compile_variant(variant: Variant, arch: Arch) -> tuple[Any | None, float | None, str | None]:
    """(CompiledKernel, CPU seconds if it was not in the cache, None), or (None, None, what the compiler says)."""
    hits: list[bool] = []
    with fake_driver(arch), knobs.compilation.scope():
        knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        start = _cpu_s()
        try:
            compiled = variant.function().preload(variant.specialization)
        except Exception as error:  # whatever a compiler raises is what it says about this kernel
            return None, None, _first_lines(error)
        return compiled, None if hits == [True] else round(_cpu_s() - start, 2), None


def _cpu_s() -> float:
    """Of this process and of the assemblers that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}"
