"""From tensors of a GGUF file to those of the Hugging Face model: names, layout, values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from gguf import quants

from isthmus.checkpoints.gguf_header import GGUFHeader, TensorInfo
from isthmus.errors import CheckpointError

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, [head_dim / 2]; part of the config in a Hugging Face model."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_GEMMA3 = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_CHUNK_ELEMENTS = 1 << 18
"""Elements that are dequantised at once, so that the float32 copy stays small and in cache."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How an architecture's tensors differ from the Hugging Face ones."""

    block_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_BLOCK))
    permuted_qk: bool = False
    """Rows of q and k are interleaved within a head: (half, pair) in Hugging Face is (pair, half) in the file."""
    norm_offset: float = 0.0
    """What the file adds to every norm weight."""


LAYOUTS: Mapping[str, TensorLayout] = MappingProxyType(
    {
        "llama": TensorLayout(permuted_qk=True),
        "qwen2": TensorLayout(),
        "qwen3": TensorLayout(),
        "gemma3": TensorLayout(MappingProxyType(_BLOCK_GEMMA3), norm_offset=1.0),
    }
)


def hf_names(header: GGUFHeader, layout: TensorLayout) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every weight, in the file's order.

    Raises CheckpointError naming a tensor that the architecture does not have.
    """
    names = {}
    for gguf_name in header.tensors:
        if gguf_name == ROPE_FREQS:
            continue
        name = _hf_name(gguf_name, layout)
        if name is None:
            raise CheckpointError(
                f"{header.path}: tensor '{gguf_name}' is unknown in architecture "
                f"'{header.metadata['general.architecture']}'; convert the model to GGUF again"
            )
        names[gguf_name] = name
    return names


def _hf_name(name: str, layout: TensorLayout) -> str | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.group("layer", "part", "kind")
    if layer is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else None
    return f"model.layers.{layer}.{layout.block_names[part]}.{kind}" if part in layout.block_names else None


def stream(
    header: GGUFHeader, layout: TensorLayout, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, host tensor of `dtype`) of every weight, one at a time."""
    data = map_data(header)
    for gguf_name, name in hf_names(header, layout).items():
        info = header.tensors[gguf_name]
        if len(info.shape) > 1:
            tensor = dequantize(info, data, dtype)
        else:
            # Vectors are changed before they are rounded: w + 1 has lost w's low bits in bfloat16.
            tensor = dequantize(info, data, torch.float32)
            if name.endswith("norm.weight"):
                tensor -= layout.norm_offset
            tensor = tensor.to(dtype)
        if layout.permuted_qk and ".q_proj." in name:
            tensor = unpermute(tensor, num_heads)
        elif layout.permuted_qk and ".k_proj." in name:
            tensor = unpermute(tensor, num_kv_heads)
        yield name, tensor


def map_data(header: GGUFHeader) -> np.ndarray:
    """The file's bytes, mapped copy-on-write: torch warns of read-only arrays."""
    return np.memmap(header.path, dtype=np.uint8, mode="c")


def dequantize(info: TensorInfo, data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The tensor's values in `dtype`, in new memory, shape `info.shape`."""
    num_columns = info.shape[-1]
    rows = data[info.offset : info.offset + info.num_bytes].reshape(math.prod(info.shape[:-1]), -1)
    out = torch.empty((len(rows), num_columns), dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // num_columns)
    for start in range(0, len(rows), step):
        # One long row: the package loops in Python over groups of rows, and blocks do not care where a row ends.
        values = quants.dequantize(rows[start : start + step].reshape(1, -1), info.type)
        out[start : start + step] = torch.from_numpy(values).view(-1, num_columns)
    return out.view(info.shape)


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[heads * (pair, half), ...] -> [heads * (half, pair), ...]: rotation by neighbours to rotation by halves."""
    return tensor.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
