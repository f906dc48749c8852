"""Every op of which the provider has a kernel, at sizes of models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from isthmus.ops.sampling import SAMPLE
from isthmus.ops.triton.aot.workload import (
    BF16,
    FP16,
    FP32,
    HOST,
    MAX_MODEL_LEN,
    META,
    NUM_REQS,
    NUM_TOKENS,
    Workload,
    registry_of,
)
from isthmus.ops.triton.arch import Arch
from isthmus.ops.triton.providers import PROVIDER


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model that the ops see."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


LLAMA_8B = ModelSizes(4096, 14336, 32, 8, 128, 128256)
SMOL_135M = ModelSizes(576, 1536, 9, 3, 64, 49152)
"""Widths that are no powers of two."""


def op_workloads(arch: Arch) -> Iterator[Workload]:
    """Every op of which the provider has a kernel, at each of the models' sizes; where none are known, the op's own."""
    registry = registry_of(arch)
    for op in registry.ops.values():
        function = registry.providers(op.name).get(PROVIDER)
        if function is None:
            continue
        if op.name == SAMPLE.name:
            yield Workload("sample 8B", partial(_run_all, function, partial(sample_inputs, LLAMA_8B.vocab)))
            continue
        if op.name not in OP_INPUTS:
            yield Workload(f"{op.name} bf16", partial(_run_all, function, partial(op.make_inputs, HOST, BF16)))
            continue
        for name, model, dtype in (
            ("bf16 8B", LLAMA_8B, BF16),
            ("fp16 8B", LLAMA_8B, FP16),
            ("fp32 8B", LLAMA_8B, FP32),
            ("bf16 135M", SMOL_135M, BF16),
        ):
            yield Workload(f"{op.name} {name}", partial(_run_all, function, partial(OP_INPUTS[op.name], model, dtype)))


def _run_all(function: Callable[..., Any], inputs: Callable[[], Iterable[tuple[Any, ...]]]) -> None:
    for arguments in inputs():
        function(*arguments)


def _tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _rms_norm_inputs(model: ModelSizes, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Of the hidden states, and of each head; with weights of both dtypes that models have."""
    for weight in dict.fromkeys((dtype, FP32)):
        yield _tensor(dtype, NUM_TOKENS, model.hidden), _tensor(weight, model.hidden), 1e-6
    yield _tensor(dtype, NUM_TOKENS * model.heads, model.head_dim), _tensor(dtype, model.head_dim), 1e-6


def _fused_add_inputs(model: ModelSizes, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    x = _tensor(dtype, NUM_TOKENS, model.hidden)
    for weight in dict.fromkeys((dtype, FP32)):
        yield x, x, _tensor(weight, model.hidden), 1e-6


def _rope_inputs(model: ModelSizes, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """q and k are views of the fused projection."""
    heads = (model.heads, model.kv_heads, model.kv_heads)
    qkv = _tensor(dtype, NUM_TOKENS, sum(heads), model.head_dim)
    q, k, _ = qkv.split(heads, dim=1)
    yield _tensor(torch.int64, NUM_TOKENS), q, k, _tensor(FP32, MAX_MODEL_LEN, model.head_dim)


def _gated_inputs(model: ModelSizes, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    yield (_tensor(dtype, NUM_TOKENS, 2 * model.intermediate),)


def sample_inputs(vocab_size: int) -> Iterator[tuple[Any, ...]]:
    """With every set of filters. Logits are float32 in every model."""
    of_rows, ids = _tensor(FP32, NUM_REQS), _tensor(torch.int64, NUM_REQS)
    for top_k, top_p, min_p in itertools.product((None, ids), (None, of_rows), (None, of_rows)):
        yield _tensor(FP32, NUM_REQS, vocab_size), of_rows, top_k, top_p, min_p, ids


OP_INPUTS: Mapping[str, Callable[[ModelSizes, torch.dtype], Iterator[tuple[Any, ...]]]] = MappingProxyType(
    {
        "rms_norm": _rms_norm_inputs,
        "fused_add_rms_norm": _fused_add_inputs,
        "rope": _rope_inputs,
        "silu_and_mul": _gated_inputs,
        "gelu_and_mul": _gated_inputs,
    }
)
"""Op -> arguments at a model's sizes."""
