"""Compiling a program for a TPU that is not here, and reading what the compiler made of it."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import topologies
from torchax.ops.mappings import t2j_dtype

from isthmus_tpu.aot_figures import CompiledProgram
from isthmus_tpu.aot_topology import Chip

KERNEL_TARGET = 'custom_call_target="tpu_custom_call"'
"""How a Pallas kernel appears in a compiled program."""
_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')
_COPY = re.compile(r" = \w+\[([\d,]+)\]\S* copy\(")
_ALIAS = re.compile(r"\{\d*\}: \(\d+, \{\}, (?:may|must)-alias\)")


def compile_for(
    chip: Chip, name: str, function: Callable[..., Any], arguments: Sequence[Any], *, donated: Sequence[int] = ()
) -> CompiledProgram:
    """Compile `function`, of jax arrays, for one core of `chip`.

    arguments: pytrees of tensors, on the meta device for instance, of which only shape and dtype are read.
    donated: indices of arguments whose memory the results may take over.
    Raises jax.errors.JaxRuntimeError with the compiler's words if it refuses.
    """
    specs = jax.tree.map(functools.partial(_spec, sharding=_one_core(chip)), tuple(arguments))
    lowered = jax.jit(function, donate_argnums=tuple(donated)).lower(*specs)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    given_away = jax.tree.leaves([specs[i] for i in donated])
    kernels = [line for line in text.splitlines() if KERNEL_TARGET in line]
    return CompiledProgram(
        name=name,
        chip=chip.name,
        compile_seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        donated=sum(spec.size * spec.dtype.itemsize for spec in given_away),
        num_donated=len(given_away),
        aliased=memory.alias_size_in_bytes,
        num_aliased=len(_ALIAS.findall(text.split("\n", 1)[0])),
        copies=_copies(text, {spec.size for spec in given_away}),
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        kernels=len(kernels),
        kernel_vmem=max(map(_vmem_of, kernels), default=0),
    )


def _copies(text: str, sizes: set[int]) -> int:
    """How many copies of the compiled program are of arrays with so many elements."""
    return sum(math.prod(map(int, dims.split(","))) in sizes for dims in _COPY.findall(text))


def _vmem_of(kernel: str) -> int:
    found = _VMEM.search(kernel)
    if found is None:
        raise ValueError(
            "the compiled program does not say how much VMEM a kernel uses; this libtpu writes it in another way: "
            f"adapt the pattern {_VMEM.pattern}"
        )
    return int(found[1])


def _one_core(chip: Chip) -> jax.sharding.Sharding:
    topology = topologies.get_topology_desc(chip.topology, platform="tpu")
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _spec(tensor: torch.Tensor, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), t2j_dtype(tensor.dtype), sharding=sharding)
