"""Ops, their providers, and the one choice made per engine.

An `Op`'s native function is its definition, its fallback and its test oracle in one. A provider is a faster
implementation under a name ("triton", "ipex", ...). `bind_ops` chooses once per engine; the result is an object
that the layers hold, so two engines in one process never share a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

from isthmus.errors import KernelError
from isthmus.platforms import AttentionBackend, AttentionSpec, DeviceInfo, LinearBackend, LinearSpec

NATIVE = "native"
OpFn = Callable[..., Any]
Backend = TypeVar("Backend", AttentionBackend, LinearBackend)


@dataclass(frozen=True, slots=True)
class Op:
    """`make_inputs(device, dtype)` yields argument tuples, awkward shapes included.

    `tolerances`: dtype -> (rtol, atol) that any provider must meet against `native`.
    """

    name: str
    native: OpFn
    make_inputs: Callable[[torch.device, torch.dtype], Iterable[tuple[Any, ...]]]
    tolerances: Mapping[torch.dtype, tuple[float, float]]


class BoundOps:
    """The ops of one engine, one attribute each, and `providers`: op name -> provider name."""

    rms_norm: OpFn
    fused_add_rms_norm: OpFn
    rope: OpFn
    silu_and_mul: OpFn
    gelu_and_mul: OpFn
    sample: OpFn

    def __init__(self, functions: Mapping[str, OpFn], providers: Mapping[str, str]) -> None:
        self.__dict__.update(functions)
        self.providers = dict(providers)


@dataclass(frozen=True, slots=True)
class Choice(Generic[Backend]):
    """The class that serves a spec, and why each better-placed one does not: (name, reason)."""

    backend: type[Backend]
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass
class KernelRegistry:
    """Filled by `isthmus_register_kernels` hooks after the platform is chosen; read once per engine."""

    ops: dict[str, Op] = field(default_factory=dict)
    _providers: dict[str, dict[str, OpFn]] = field(default_factory=dict)
    _attention: dict[str, type[AttentionBackend]] = field(default_factory=dict)
    _linear: dict[str, type[LinearBackend]] = field(default_factory=dict)

    def define(self, op: Op) -> None:
        """Add an op with its native definition. Raises KernelError for a second definition of the name."""
        if op.name in self.ops:
            raise KernelError(f"op {op.name!r} is already defined; give the new op another name")
        self.ops[op.name] = op
        self._providers[op.name] = {NATIVE: op.native}

    def add_op(self, name: str, provider: str, fn: OpFn) -> None:
        """Add `provider`'s implementation of op `name`. Raises KernelError if the op is unknown or the pair taken."""
        if name not in self.ops:
            raise KernelError(
                f"provider {provider!r} offers op {name!r}, which does not exist; ops: {', '.join(sorted(self.ops))}"
            )
        if provider in self._providers[name]:
            raise KernelError(f"op {name!r} already has a provider {provider!r}; choose another provider name")
        self._providers[name][provider] = fn

    def add_attention(self, backend: type[AttentionBackend]) -> None:
        """Add an attention backend under its `name`."""
        if backend.name in self._attention:
            raise KernelError(f"attention {backend.name!r} is already registered; choose another name")
        self._attention[backend.name] = backend

    def add_linear(self, backend: type[LinearBackend]) -> None:
        """Add a linear backend under its `name`."""
        if backend.name in self._linear:
            raise KernelError(f"linear {backend.name!r} is already registered; choose another name")
        self._linear[backend.name] = backend

    def providers(self, name: str) -> Mapping[str, OpFn]:
        """Provider name -> function of op `name`."""
        return dict(self._providers[name])

    def attention_backends(self) -> Mapping[str, type[AttentionBackend]]:
        """Name -> class of every registered attention backend."""
        return dict(self._attention)

    def linear_backends(self) -> Mapping[str, type[LinearBackend]]:
        """Name -> class of every registered linear backend."""
        return dict(self._linear)

    def bind_ops(
        self,
        priority: Mapping[str, Sequence[str]],
        overrides: Mapping[str, str] | None = None,
        refused_native: Mapping[str, str] = MappingProxyType({}),
    ) -> BoundOps:
        """Choose one provider per op: an override, else the first registered name of the priority, else native.

        refused_native: of the platform.  Raises KernelError for an override that names no registered provider, and
        where native would serve an op that it is refused for.
        """
        overrides = overrides or {}
        for name in overrides:
            if name not in self.ops:
                raise KernelError(f"kernels.{name}: no such op; ops: attention, {', '.join(sorted(self.ops))}")
        functions: dict[str, OpFn] = {}
        chosen: dict[str, str] = {}
        for name, offers in self._providers.items():
            wanted = overrides.get(name)
            if wanted is not None and wanted not in offers:
                raise KernelError(f"kernels.{name}={wanted}: no such provider; registered: {', '.join(sorted(offers))}")
            order = [wanted] if wanted is not None else [*priority.get(name, priority.get("*", ())), NATIVE]
            chosen[name] = next(p for p in order if p in offers)
            if chosen[name] == NATIVE and name in refused_native:
                others = ", ".join(sorted(offers.keys() - {NATIVE})) or "none is registered"
                raise KernelError(
                    f"kernels.{name}={NATIVE}: refused on this platform: {refused_native[name]}; use another provider "
                    f"({others})"
                )
            functions[name] = offers[chosen[name]]
        return BoundOps(functions, chosen)

    def select_attention(
        self,
        spec: AttentionSpec,
        info: DeviceInfo,
        priority: Sequence[str],
        override: str | None = None,
        refused_native: Mapping[str, str] = MappingProxyType({}),
    ) -> Choice[AttentionBackend]:
        """The first backend of the priority that supports `spec`, native last, unless the platform refuses it.

        Raises KernelError, with every reason, if none does or the override does not.
        """
        return _select("attention", self._attention, spec, info, priority, override, refused_native.get("attention"))

    def select_linear(
        self, spec: LinearSpec, info: DeviceInfo, priority: Sequence[str], override: str | None = None
    ) -> Choice[LinearBackend]:
        """The same for linear layers."""
        return _select("linear", self._linear, spec, info, priority, override)


def _select(
    kind: str,
    registered: Mapping[str, type[Backend]],
    spec: Any,
    info: DeviceInfo,
    priority: Sequence[str],
    override: str | None,
    refused_native: str | None = None,
) -> Choice[Backend]:
    order = [override] if override is not None else [*(name for name in priority if name != NATIVE), NATIVE]
    rejected: list[tuple[str, str]] = []
    for name in order:
        backend = registered.get(name)
        reason = "not registered" if backend is None else backend.unsupported_reason(spec, info)
        if name == NATIVE and refused_native is not None:
            reason = f"refused on this platform: {refused_native}"
        if backend is not None and reason is None:
            return Choice(backend, tuple(rejected))
        rejected.append((name, reason or ""))
    why = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise KernelError(f"no {kind} backend for {spec}: {why}; registered: {', '.join(sorted(registered))}")
