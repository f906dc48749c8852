"""A model that says what it is told: its next token is looked up in a table by position.

For tests that need an exact text. The table is the checkpoint's only weight, so everything around the model is the
real thing: the engine, the sampler, the tokenizer. The model comes through a plugin, which this module is, as any
out-of-tree architecture does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from isthmus.layers.embedding import VocabEmbedding
from isthmus.layers.env import ForwardContext, ModelEnv
from isthmus.models.base import CausalLM
from isthmus.models.spec import ModelSpec
from isthmus.plugins import hookimpl
from isthmus.plugins.manager import GROUP, PluginManager

if TYPE_CHECKING:
    from isthmus.models.registry import ModelRegistry

ARCHITECTURE = "ScriptedForCausalLM"
MAX_LEN = 128
LOGIT = 10.0
"""Logit of the scripted token; all others have 0."""


class ScriptedForCausalLM(CausalLM):
    """A table of logits by position [MAX_LEN, vocab_size] and no attention: hidden states are the logits."""

    def __init__(self, spec: ModelSpec, env: ModelEnv) -> None:
        super().__init__(spec, env)
        self.script = VocabEmbedding(MAX_LEN, spec.vocab_size, env)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden: torch.Tensor = self.script(positions)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@hookimpl
def isthmus_register_models(registry: ModelRegistry) -> None:
    registry.register(ARCHITECTURE, f"{__name__}:{ScriptedForCausalLM.__name__}")


def scripted_model(path: Path, tokenizer: PreTrainedTokenizerBase, script: Sequence[int]) -> Path:
    """Write a checkpoint into the folder `path`, which is made, and return it.

    A prompt of one token is answered with `script` and then end-of-sequence tokens; a prompt of n tokens takes the
    place of the first n - 1 tokens of the script.
    """
    vocab_size = len(tokenizer)
    table = torch.zeros(MAX_LEN, vocab_size)
    tokens = [*script, *[tokenizer.eos_token_id] * (MAX_LEN - len(script))]
    table[range(MAX_LEN), tokens] = LOGIT
    path.mkdir()
    save_file({"script.weight": table}, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "max_position_embeddings": MAX_LEN,
        "num_hidden_layers": 0,
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(path)
    return path


def scripted_plugins() -> PluginManager:
    """The installed plugins and this one."""
    return PluginManager.load(entry_points=[*entry_points(group=GROUP), EntryPoint("scripted", __name__, GROUP)])
