"""The programs of an engine that serves a model of Llama 3.1 8B's shape, as arguments for the TPU compiler.

The model is the engine's own, built on the meta device and carried through torchax as it is; attention is the Pallas
backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torchax.interop import jax_view

from isthmus.layers.env import AttentionGroups, ModelEnv
from isthmus.models.base import CausalLM
from isthmus.models.loader import build_model
from isthmus.models.spec import ModelSpec
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus_tpu.aot_compile import compile_for
from isthmus_tpu.aot_figures import CompiledProgram
from isthmus_tpu.aot_report import Entry
from isthmus_tpu.aot_topology import Chip
from isthmus_tpu.torchax_attention import PallasAttentionBackend, PallasMetadata
from isthmus_tpu.torchax_program import pure_step_of_weights, weights_of
from tpu_aot.contexts import make_context

NUM_LAYERS = 32
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
)
POOL_BLOCKS: Mapping[str, int] = MappingProxyType({"v5e": 128, "v6e": 6144})
"""Blocks of the KV pool: what is left of the chip's memory beside 15 GiB of weights, or less."""
META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class StepShape:
    """A padded step: tokens, requests, columns of the block table, and whether every request has one token."""

    name: str
    num_tokens: int
    num_reqs: int
    table_width: int
    decode: bool

    @property
    def what(self) -> str:
        context = self.table_width * BLOCK_SIZE
        return f"{self.num_tokens} tokens of {self.num_reqs} request(s), each at most {context} tokens long"


STEPS = (
    StepShape("decode", 64, 64, 128, decode=True),
    StepShape("prefill", 2048, 1, 256, decode=False),
    StepShape("mixed", 512, 64, 128, decode=False),
)
HEAD = "head"
HEAD_ROWS = 64


class Head(nn.Module):
    """From hidden states to token ids: what follows the last layer, as one program."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size], rows [R] -> [R] the likeliest ids"""
        return self.model.compute_logits(hidden.index_select(0, rows)).argmax(dim=-1).to(torch.int32)


@dataclass(frozen=True, slots=True)
class Llama:
    """The model on the meta device and its attention."""

    model: CausalLM
    attention: AttentionGroups

    @classmethod
    def build(cls, num_layers: int = NUM_LAYERS) -> Llama:
        spec = ModelSpec.from_hf({**CONFIG, "num_hidden_layers": num_layers}, max_model_len=MAX_MODEL_LEN)
        registry = KernelRegistry()
        register_native(registry)
        attention = AttentionGroups(lambda layer: PallasAttentionBackend(layer, META))
        env = ModelEnv(registry.bind_ops({}), attention, torch.bfloat16, torch.bfloat16, BLOCK_SIZE)
        return cls(build_model(spec, env, META), attention)

    @property
    def num_layers(self) -> int:
        return len(self.attention.layer_groups)

    def caches(self, num_blocks: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Of every layer; the null block comes on top."""
        layout = self.attention.backends[0].kv_cache_layout(num_blocks + 1)
        return tuple(
            tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=META) for tensor in layout.tensors)
            for _ in range(self.num_layers)
        )

    def resident(self, num_blocks: int) -> int:
        """Bytes of all weights and of the pool."""
        return _nbytes(weights_of(self.model).values()) + sum(_nbytes(layer) for layer in self.caches(num_blocks))


def compile_step(llama: Llama, chip: Chip, shape: StepShape) -> Entry:
    """The whole forward of one step: every layer, caches donated."""
    num_blocks = POOL_BLOCKS[chip.name]
    metadata = PallasMetadata(
        query_start_loc=_ints(shape.num_reqs + 1),
        seq_lens=_ints(shape.num_reqs),
        block_table=_ints(shape.num_reqs, shape.table_width),
        slots=_ints(shape.num_tokens),
        decode=shape.decode,
    )
    tokens = _ints(shape.num_tokens)
    step = pure_step_of_weights(llama.model, make_context((), ()))
    arguments = (weights_of(llama.model), llama.caches(num_blocks), tokens, tokens, (metadata,))
    return _entry(llama, compile_for(chip, shape.name, step, arguments, donated=[1]), shape.what)


def compile_head(llama: Llama, chip: Chip) -> Entry:
    """Logits and the greedy token of every request."""
    head = Head(llama.model)

    def pick(weights: Mapping[str, torch.Tensor], hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ids: torch.Tensor = functional_call(head, dict(weights), (hidden, rows))
        return ids

    hidden = torch.empty(STEPS[-1].num_tokens, CONFIG["hidden_size"], dtype=torch.bfloat16, device=META)
    arguments = (weights_of(head), hidden, _ints(HEAD_ROWS))
    program = compile_for(chip, HEAD, jax_view(pick), arguments)
    return _entry(llama, program, f"logits and likeliest ids of {HEAD_ROWS} of {len(hidden)} tokens")


def compile_all(llama: Llama, chip: Chip) -> list[Entry]:
    return [*(compile_step(llama, chip, shape) for shape in STEPS), compile_head(llama, chip)]


def _entry(llama: Llama, program: CompiledProgram, what: str) -> Entry:
    """The engine holds all weights and the pool, whether or not this program takes them as arguments."""
    held = llama.resident(POOL_BLOCKS[program.chip])
    return Entry(program, what, resident=max(held - program.arguments, 0))


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
