"""Qwen3: Llama with an RMS norm on every head of q and k before rope; head_dim is set apart from hidden_size."""

from __future__ import annotations

from isthmus.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with norms on q and k."""
