"""Portable GPU kernels in Triton: provider "triton" of the ops, and the attention backend of that name.

Triton is optional. Only the modules in `kernels` import it, `attention_ws`, which describes tensors to one of them, and
`interpreter`, which corrects it; they are imported by `providers` and `attention`, and those only where
`unavailable_reason` finds nothing in the way.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from isthmus.ops.triton.arch import ARCHS, Arch, assumed, relatives
from isthmus.plugins import Probe
from isthmus.plugins.entry import ONLY_BY_NAME, UNUSABLE

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry

logger = logging.getLogger(__name__)

INTERPRET = "TRITON_INTERPRET"
"""Triton's own environment variable. Read when a kernel is decorated, so it must be set before any is imported."""
INTERPRETED_MULTIPROCESSORS = 4
"""Of a device that is interpreted: programs run one after the other, and each takes time even if it has no work."""
_YES = frozenset({"1", "true", "yes", "on", "y"})
"""What Triton takes for yes."""


def is_interpreting(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether kernels of this process run in Triton's interpreter, on the host."""
    return environ.get(INTERPRET, "").lower() in _YES


def unavailable_reason(*, interpreted: bool = False, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why kernels cannot run here, and what to do; None if they can. Imports neither torch nor triton.

    interpreted: on the host, in the interpreter, instead of on a device that the caller has.
    """
    package = importlib.util.find_spec("triton")
    if package is None or package.origin is None:  # a folder of that name, with no code in it, is not the package
        return "the package triton is not installed; pip install triton"
    if interpreted and not is_interpreting(environ):
        return f"for tests only: set {INTERPRET}=1 in the environment to run the kernels in an interpreter"
    if not interpreted and is_interpreting(environ):
        return f"{INTERPRET}={environ[INTERPRET]} makes kernels run on the host; unset it to run them on the device"
    return None


def probe_interpreter(arch: str, environ: Mapping[str, str] = os.environ) -> Probe:
    """Of a platform that interprets the kernels for `arch` on the host: for tests, so it is never chosen by itself."""
    reason = unavailable_reason(interpreted=True, environ=environ)
    if reason is not None:
        return Probe(UNUSABLE, reason)
    return Probe(ONLY_BY_NAME, f"interprets the kernels for {arch} on the host", device_count=1)


def register_kernels(
    registry: KernelRegistry,
    arch: str,
    *,
    multiprocessors: int = INTERPRETED_MULTIPROCESSORS,
    interpreted: bool = False,
    facts: Arch | None = None,
) -> None:
    """Offer what runs on an architecture, by its `DeviceInfo.arch`; where that is nothing, say why in the log.

    facts: from the device itself. Without them, an architecture that the table of facts lacks is taken for the least
    of its relatives, which the log says as well.
    """
    reason = unavailable_reason(interpreted=interpreted)
    facts = facts or facts_of(arch)
    if reason is None and facts is None:
        reason = f"no facts about {arch} or a relative of it; there are some about {', '.join(ARCHS)}"
    if reason is not None or facts is None:
        logger.warning("no Triton kernels: %s", reason)
        return
    from isthmus.ops.triton.providers import register

    register(registry, replace(facts, multiprocessors=multiprocessors))


def cache_dtypes(arch: str) -> tuple[str, ...]:
    """For `DeviceInfo.cache_dtypes`: what the kernels' KV cache may have besides compute dtypes; none of an
    architecture that the table lacks.
    """
    return ARCHS[arch].fp8_kv if arch in ARCHS else ()


def facts_of(arch: str) -> Arch | None:
    """The table's row, or one that is safe; None if there is nothing to go by."""
    if arch in ARCHS:
        return ARCHS[arch]
    facts = assumed(arch)
    if facts is not None:
        logger.warning(
            "%s is not in the table of architecture facts: its Triton kernels are launched as the least of %s allows, "
            "which is right but may be slow; a row in isthmus/ops/triton/arch.py makes it one of its own",
            arch,
            ", ".join(row.name for row in relatives(arch)),
        )
    return facts
