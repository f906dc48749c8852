"""Building an engine core that is spoken to, in whatever thread or process it is to live."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.config import EngineConfig
from isthmus.engine.core import EngineCore
from isthmus.engine.engine_info import EngineInfo, Started
from isthmus.engine.setup import EngineSetup, make_core, prepare
from isthmus.plugins.manager import PluginManager


def boot(
    config: EngineConfig, make_plugins: Callable[[], PluginManager] | None, on_stage: Callable[[str], None]
) -> tuple[EngineCore, Started]:
    """A core that is ready, and what its front end must know of it. Raises what `prepare` and the worker's start do."""
    on_stage("reading the model")
    setup = prepare(config, None if make_plugins is None else make_plugins())
    core = make_core(setup, isolate_faults=True, on_stage=on_stage)
    return core, Started(core.config, _info(setup, core))


def _info(setup: EngineSetup, core: EngineCore) -> EngineInfo:
    config, [ledger] = core.config, core.rpc("memory_ledger")
    return EngineInfo(
        platform=setup.selection.name,
        device=setup.selection.platform.device_info(config.device.index).name,
        vocab_size=setup.spec.vocab_size,
        hidden_size=setup.spec.hidden_size,
        num_blocks=[group.num_blocks for group in core.limits.groups],
        block_size=config.cache.block_size,
        weights_bytes=ledger.weights,
        activations_bytes=ledger.activations,
        kv_pool_bytes=ledger.kv_pool,
    )
