"""What is measured: at full size on a GPU, and tiny, to see on any machine that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one attention layer."""

    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} x {self.dim}"


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's shape: (number of requests, their query tokens, tokens in their caches after the step), repeated.

    kind: "decode", "prefill" or "mixed".
    """

    kind: str
    groups: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        return " + ".join(f"{count} x {query} of {length}" for count, query, length in self.groups)

    @property
    def requests(self) -> list[tuple[int, int]]:
        """(query tokens, tokens in the cache) of each."""
        return [(query, length) for count, query, length in self.groups for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Sizes:
    """model, model_name: settings of a Hugging Face config, and what to call it.  decode_batches: running requests of
    the steps that are timed.  prompt, steps: tokens of each of their prompts, and decodes that are timed.  requests,
    inputs, outputs: of the throughput run, lengths in tokens.  kit: arguments of the conformance kit.
    """

    heads: Sequence[Heads]
    batches: Sequence[Batch]
    model: Mapping[str, Any]
    model_name: str
    max_model_len: int
    max_num_seqs: int
    decode_batches: Sequence[int]
    prompt: int
    steps: int
    requests: int
    inputs: int
    outputs: int
    kit: Sequence[str] = ()


def _decode(count: int, length: int) -> Batch:
    return Batch("decode", ((count, 1, length),))


def _prefill(count: int, query: int, length: int | None = None) -> Batch:
    return Batch("prefill", ((count, query, length or query),))


LLAMA_8B = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    }
)
"""The shape of Llama 3 8B."""

FULL = Sizes(
    # Llama 3 8B, Qwen 2.5 7B, a layer of Llama 3 70B on one of eight devices, one without groups.
    heads=(Heads(32, 8, 128), Heads(28, 4, 128), Heads(8, 1, 128), Heads(32, 32, 128)),
    # The most telling first: time may run out.
    batches=(
        _decode(64, 8192),
        _prefill(1, 8192),
        Batch("mixed", ((64, 1, 4096), (1, 2048, 8192))),
        _decode(1, 32768),
        _decode(256, 2048),
        _prefill(8, 1024),
        _prefill(1, 2048, 32768),
        _decode(16, 8192),
        _decode(256, 512),
        _decode(16, 1024),
        _decode(1, 2048),
        _decode(128, 16384),
        _prefill(1, 32768),
        Batch("mixed", ((255, 1, 1024), (1, 512, 512))),
        Batch("mixed", ((32, 1, 1000), (8, 1, 30000), (3, 500, 1500))),
    ),
    model=LLAMA_8B,
    model_name="random weights in the shape of Llama 3 8B",
    max_model_len=8192,
    max_num_seqs=256,
    decode_batches=(1, 8, 64, 256),
    prompt=128,
    steps=48,
    requests=256,
    inputs=1024,
    outputs=256,
)
TINY = Sizes(
    heads=(Heads(4, 2, 16),),
    batches=(_decode(3, 64), _prefill(1, 48), Batch("mixed", ((2, 1, 40), (1, 16, 32)))),
    model={
        **LLAMA_8B,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    model_name="random weights, tiny",
    max_model_len=256,
    max_num_seqs=8,
    decode_batches=(1, 4),
    prompt=16,
    steps=6,
    requests=4,
    inputs=24,
    outputs=8,
    kit=("--isthmus-area", "plugin", "--isthmus-area", "device"),
)
