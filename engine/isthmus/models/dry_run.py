"""Steps of a model without its weights and without a device: for what they launch, when launches are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from isthmus.errors import ConfigError
from isthmus.layers.env import AttentionGroups, ForwardContext, ModelEnv
from isthmus.models.base import CausalLM
from isthmus.models.registry import ModelRegistry
from isthmus.models.spec import ModelSpec
from isthmus.ops.triton.aot.attention_workloads import NUM_BLOCKS, default_block_size, made_up_batch
from isthmus.ops.triton.aot.op_workloads import sample_inputs
from isthmus.ops.triton.aot.workload import HOST, META, NUM_REQS, NUM_TOKENS, Workload, registry_of
from isthmus.ops.triton.arch import Arch
from isthmus.ops.triton.providers import PROVIDER
from isthmus.ops.triton.tuning import DECODE, PREFILL
from isthmus.platforms import AttentionBackend, AttentionSpec, BatchShape, DeviceInfo

STEPS: Mapping[str, tuple[int, ...]] = MappingProxyType({DECODE: (1,) * NUM_REQS, PREFILL: (NUM_TOKENS,)})
"""Kind -> queries of each request."""


def dtype_of(name: str) -> torch.dtype:
    """Raises ConfigError for a name that is none of torch's dtypes."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError([f"dtype={name}: torch has no such dtype; for example bfloat16, float16, float8_e4m3fn"])
    return dtype


def model_workloads(
    spec: ModelSpec,
    arch: Arch,
    *,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype | None = None,
    block_size: int | None = None,
) -> list[Workload]:
    """A decode, a prefill, and the draws that follow, as the model's own code launches them.

    kv_cache_dtype: None = dtype.  block_size: None = the platform's default.
    Raises KernelError for what the attention does not support, UnsupportedModelError for an unknown architecture.
    """
    registry = registry_of(arch)
    info = DeviceInfo(arch.name, arch.name, 0, ())

    def make_backend(wanted: AttentionSpec) -> AttentionBackend:
        return registry.select_attention(wanted, info, (PROVIDER,), PROVIDER).backend(wanted, HOST)

    env = ModelEnv(
        ops=registry.bind_ops({"*": (PROVIDER,)}),
        attention=AttentionGroups(make_backend),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype or dtype,
        block_size=block_size or default_block_size(arch),
        device=META,
    )
    # Layers that are alike launch alike.
    model = ModelRegistry().resolve(spec.architecture)(replace(spec, layers=tuple(dict.fromkeys(spec.layers))), env)
    steps = [Workload(f"{spec.architecture} {kind}", partial(_step, model, env, lens)) for kind, lens in STEPS.items()]
    return [*steps, Workload(f"{spec.architecture} draws", partial(_draws, spec, env))]


@torch.inference_mode()
def _step(model: CausalLM, env: ModelEnv, query_lens: tuple[int, ...]) -> None:
    groups = env.attention
    batch = made_up_batch(env.block_size, query_lens)
    caches = tuple(
        tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
            for tensor in groups.backends[group].kv_cache_layout(NUM_BLOCKS).tensors
        )
        for group in groups.layer_groups
    )
    context = ForwardContext(
        kv_caches=caches,
        metadata=tuple(backend.build_metadata(batch) for backend in groups.backends),
        shape=BatchShape(batch.num_tokens, batch.num_reqs, batch.max_query_len),
        graph_support=min(backend.graph_support for backend in groups.backends),
    )
    ids = torch.empty(batch.num_tokens, dtype=torch.int64, device=META)
    model.forward(ids, ids, context)


def _draws(spec: ModelSpec, env: ModelEnv) -> None:
    for arguments in sample_inputs(spec.vocab_size):
        env.ops.sample(*arguments)
