"""Architecture name -> model class, imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from types import MappingProxyType

from isthmus.errors import PluginError, UnsupportedModelError
from isthmus.models.base import CausalLM

BUILTIN_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3ForCausalLM": "isthmus.models.gemma3:Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": "isthmus.models.gemma3:Gemma3ForConditionalGeneration",
        "LlamaForCausalLM": "isthmus.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "isthmus.models.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "isthmus.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "isthmus.models.qwen3:Qwen3ForCausalLM",
    }
)


class ModelRegistry:
    """Starts with the built-in models; `isthmus_register_models` hooks add to it."""

    def __init__(self) -> None:
        self._targets = dict(BUILTIN_MODELS)

    def register(self, architecture: str, target: str) -> None:
        """Add `architecture` as "module:Class", not imported yet. A built-in name may be replaced.

        Raises PluginError if the target is not of that form.
        """
        module, _, name = target.partition(":")
        if not module or not name:
            raise PluginError(f"model {architecture!r}: target {target!r} is not of the form 'module:Class'")
        self._targets[architecture] = target

    def supported(self) -> list[str]:
        """The known architecture names, sorted."""
        return sorted(self._targets)

    def resolve(self, architecture: str) -> type[CausalLM]:
        """Import and return the class.

        Raises UnsupportedModelError for an unknown name, PluginError if its module cannot be imported.
        """
        target = self._targets.get(architecture)
        if target is None:
            close = difflib.get_close_matches(architecture, self._targets, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UnsupportedModelError(
                f"architecture {architecture!r} is not supported; {hint}supported: {', '.join(self.supported())}"
            )
        module, _, name = target.partition(":")
        try:
            model: type[CausalLM] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise PluginError(f"model {architecture!r}: cannot import {target!r}: {error}") from error
        return model
