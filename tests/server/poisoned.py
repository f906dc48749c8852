"""A Llama that cannot compute one token: the fault of a model runner, planted."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isthmus.layers.env import ForwardContext
from isthmus.models.llama import LlamaForCausalLM
from isthmus.plugins import hookimpl
from isthmus.plugins.manager import GROUP, PluginManager

if TYPE_CHECKING:
    from isthmus.models.registry import ModelRegistry

ARCHITECTURE = "PoisonedLlamaForCausalLM"
POISON = 383


class PoisonedLlamaForCausalLM(LlamaForCausalLM):
    """Fails when the batch has the token in it."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        if bool((input_ids == POISON).any()):
            raise ZeroDivisionError(f"token {POISON} in a batch of {len(input_ids)}")
        return super().forward(input_ids, positions, ctx)


@hookimpl
def isthmus_register_models(registry: ModelRegistry) -> None:
    registry.register(ARCHITECTURE, f"{__name__}:{PoisonedLlamaForCausalLM.__name__}")


def poisoned_plugins() -> PluginManager:
    """The installed plugins and this one."""
    return PluginManager.load(entry_points=[*entry_points(group=GROUP), EntryPoint("poisoned", __name__, GROUP)])


def poisoned_model(llama: Path, path: Path) -> Path:
    """A copy of a tiny Llama that names the poisoned class."""
    shutil.copytree(llama, path)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = [ARCHITECTURE]
    (path / "config.json").write_text(json.dumps(config))
    return path
