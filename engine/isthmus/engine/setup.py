"""From a model's name to everything an engine is built of: checkpoint, spec, platform, resolved config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.hf_tokenizer import load_hf_tokenizer
from isthmus.checkpoints.open import open_checkpoint
from isthmus.config import EngineConfig, ModelFacts, PlatformFacts, Resolved, resolve
from isthmus.engine.core import EngineCore
from isthmus.engine.input_processor import eos_token_ids
from isthmus.executor.threaded import ThreadedExecutor
from isthmus.executor.uniproc import UniprocExecutor
from isthmus.models.spec import ModelSpec
from isthmus.plugins.manager import PluginManager, Selection
from isthmus.plugins.policy import PolicyRegistry
from isthmus.structured.compiler import GrammarCompiler
from isthmus.structured.tokenizer import TokenizerText
from isthmus.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedTokenizerBase

    from isthmus.platforms import Platform


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The parts, chosen and checked, before anything is loaded."""

    resolved: Resolved
    selection: Selection
    plugins: PluginManager
    checkpoint: Checkpoint
    spec: ModelSpec

    @property
    def config(self) -> EngineConfig:
        return self.resolved.config

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one that the config names, else the checkpoint's own. Raises CheckpointError if it is unusable."""
        other = self.config.model.tokenizer
        return self.checkpoint.tokenizer() if other is None else load_hf_tokenizer(other)

    def tokenizer_text(self) -> TokenizerText:
        """The tokenizer, and every id that ends a text."""
        tokenizer = self.tokenizer()
        eos_ids = eos_token_ids(self.checkpoint.generation_config(), self.checkpoint.config(), tokenizer)
        return TokenizerText.of(tokenizer, eos_ids)


def prepare(config: EngineConfig, plugins: PluginManager | None = None) -> EngineSetup:
    """Find the model, choose the platform, resolve the config.

    Raises ModelError, PlatformError or ConfigError.
    """
    plugins = plugins or PluginManager.load()
    selection = plugins.select(config.device.device)
    checkpoint = open_checkpoint(config.model.model, revision=config.model.revision)
    spec = ModelSpec.from_hf(checkpoint.config())
    info = selection.platform.device_info(config.device.index)
    resolved = resolve(
        config,
        ModelFacts(
            architecture=spec.architecture,
            dtype=spec.dtype,
            max_position_embeddings=spec.max_position_embeddings,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            checkpoint_format=checkpoint.format,
        ),
        PlatformFacts(
            name=selection.name,
            device=f"{info.name} ({info.arch})",
            dtypes=info.dtypes,
            cache_dtypes=info.cache_dtypes,
            proposals=_proposals(selection.platform, config),
        ),
    )
    spec = replace(spec, max_model_len=resolved.config.model.max_model_len)
    return EngineSetup(resolved, selection, plugins, checkpoint, spec)


def _proposals(platform: Platform, config: EngineConfig) -> Mapping[str, object]:
    """What the platform proposes, and what follows from the facts about its devices."""
    return {"scheduler.async_scheduling": platform.is_asynchronous, **platform.config_defaults(config)}


def make_core(
    setup: EngineSetup, *, isolate_faults: bool = False, on_stage: Callable[[str], None] | None = None
) -> EngineCore:
    """Start an engine core with its worker in this process. on_stage: is told what the worker is about to do."""

    def make_worker(config: EngineConfig) -> Worker:
        return Worker(config, setup.selection.platform, setup.plugins, setup.checkpoint, setup.spec, on_stage)

    policies = PolicyRegistry()
    setup.plugins.register_policies(policies)
    asked = setup.resolved.provenance["model.max_model_len"].source == "user"
    executor = ThreadedExecutor if setup.config.scheduler.async_scheduling else UniprocExecutor
    return EngineCore(
        setup.config,
        executor(make_worker),
        policy=policies.make(setup.config.scheduler),
        may_lower_max_model_len=not asked,
        isolate_faults=isolate_faults,
        compiler=GrammarCompiler(setup.tokenizer_text, setup.spec.vocab_size),
    )
