"""Which kernels, where the platform's own order is not wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import AUTO, Spec
from isthmus.config.section import Section


def _one_provider_each(ops: tuple[tuple[str, str], ...]) -> str | None:
    if not all(op and provider for op, provider in ops):
        return "has an empty name; write for example rms_norm=native"
    if len(dict(ops)) < len(ops):
        return "names an op twice; give each op one provider"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig(Section):
    """Overrides of the platform's kernel priority. Names are checked when kernels are bound, not here."""

    path: ClassVar[str] = "kernels"

    attention: Annotated[
        str | None,
        Spec(
            fallback=None,
            help="Attention backend of every layer; none takes, for each kind of layer, the first of the platform's "
            "priority that supports it.",
        ),
    ] = AUTO
    linear: Annotated[
        str | None,
        Spec(
            fallback=None,
            help="Backend of linear layers; none takes, for each shape, the first of the platform's priority that "
            "supports it.",
        ),
    ] = AUTO
    ops: Annotated[
        tuple[tuple[str, str], ...],
        Spec(check=_one_provider_each, help="Op and provider, where another than the platform's first is wanted."),
    ] = ()
