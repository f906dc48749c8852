"""Mistral: Llama with a sliding window on every layer, which the spec carries."""

from __future__ import annotations

from isthmus.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window."""
