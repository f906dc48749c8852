"""The TPU compiler takes the kernel and the programs, and what is wrong with a program is seen.

The 32 layers are compiled by write_programs.py; here it is one, and small programs with one fault each.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from isthmus.errors import ConfigError
from isthmus_tpu.aot_compile import compile_for
from isthmus_tpu.aot_topology import CHIPS, MIB, Chip, chip
from isthmus_tpu.pallas_attention import Tiling, default_tiling, ragged_paged_attention, write_to_pages
from tpu_aot.llama_programs import META, STEPS, Llama, compile_head, compile_step

EACH_CHIP = pytest.mark.parametrize("target", CHIPS, ids=lambda target: target.name)
POOL = (4096, 8, 16, 128)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int32)


def kernel_arguments(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """8 requests with 64 pages each"""
    pool = tensor(512, num_kv_heads, page_size, head_dim, dtype=dtype)
    return [tensor(num_tokens, num_heads, head_dim, dtype=dtype), pool, pool, ints(9), ints(8), ints(8, 64)]


@EACH_CHIP
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size", "options"),
    [
        (32, 8, 128, 16, {}),
        (4, 1, 256, 16, {"sliding_window": 512}),
        (9, 3, 128, 32, {"soft_cap": 30.0}),
        (32, 32, 128, 16, {}),
        (16, 2, 128, 128, {}),
    ],
    ids=["llama", "gemma3", "smollm2", "no-groups", "large-pages"],
)
def test_the_kernel_compiles_and_fits(
    target: Chip,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    options: dict[str, Any],
) -> None:
    for decode in (True, False):
        tiling = default_tiling(num_heads, num_kv_heads, head_dim, page_size, dtype.itemsize, decode=decode)

        def attend(*arrays: jax.Array, tiling: Tiling = tiling) -> jax.Array:
            return ragged_paged_attention(*arrays, scale=0.1, tiling=tiling, **options)

        arguments = kernel_arguments(200, num_heads, num_kv_heads, head_dim, page_size, dtype)
        program = compile_for(target, "kernel", attend, arguments)
        assert program.kernels == 1
        assert 0 < program.kernel_vmem < target.vmem_bytes
        assert program.problems(target) == []


def test_a_decode_step_of_the_engines_model() -> None:
    entry = compile_step(Llama.build(num_layers=1), chip("v6e"), STEPS[0])
    assert entry.problems() == []
    assert entry.program.kernels == 1
    assert entry.program.num_aliased == 2


def test_the_head() -> None:
    entry = compile_head(Llama.build(num_layers=1), chip("v5e"))
    assert entry.problems() == []
    assert entry.program.results < 4096, "only ids leave the device"


@EACH_CHIP
def test_a_pool_is_written_in_place(target: Chip) -> None:
    program = compile_for(
        target, "write", write_to_pages, [tensor(*POOL), tensor(2048, 8, 128), ints(2048)], donated=[0]
    )
    assert program.problems(target) == []
    assert program.num_aliased == 1


def test_a_buffer_that_cannot_be_aliased_is_found() -> None:
    def grow(pool: jax.Array) -> jax.Array:
        return pool.astype(jnp.float32)

    target = chip("v6e")
    program = compile_for(target, "grow", grow, [tensor(*POOL)], donated=[0])
    assert program.problems(target) == [
        "0 buffers of 0 bytes are aliased, 1 of 134217728 were donated: the others are copied every step"
    ]


def test_an_aliased_pool_that_is_copied_all_the_same_is_found() -> None:
    """What the compiler makes of a scatter of whole tokens into pages that have the heads first."""

    def scatter(pool: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
        return pool.at[slots // 16, :, slots % 16].set(new)

    target = chip("v6e")
    arguments = [tensor(*POOL), tensor(2048, 8, 128), ints(2048)]
    program = compile_for(target, "scatter", scatter, arguments, donated=[0])
    assert program.num_aliased == 1
    assert program.problems(target) == ["2 copies of whole donated buffers within the program"]


@EACH_CHIP
def test_the_compiler_states_the_chips_memory(target: Chip) -> None:
    too_much = tensor(target.hbm_bytes)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"exceeds available HBM \({target.hbm_bytes / 2**30:.2f}G\)"):
        compile_for(target, "large", lambda x: x * 2, [too_much])


@EACH_CHIP
def test_the_compiler_states_a_kernels_memory(target: Chip) -> None:
    """16 pages of 1024 keys, twice, for keys and values, are 64 MiB."""

    def attend(*arrays: jax.Array) -> jax.Array:
        return ragged_paged_attention(*arrays, scale=0.1, tiling=Tiling(tile=8, pages=16))

    arguments = kernel_arguments(64, 4, 1, 256, 1024, torch.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"limit {target.vmem_bytes / MIB:.2f}M exceeded scoped vmem"):
        compile_for(target, "large", attend, arguments)


def test_an_unknown_chip() -> None:
    with pytest.raises(ConfigError, match="chip=v9: no such TPU generation; known: v5e, v6e"):
        chip("v9")
