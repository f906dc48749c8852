"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v only, and optionally a sliding window on the upper layers."""

from __future__ import annotations

from isthmus.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with a qkv bias."""
