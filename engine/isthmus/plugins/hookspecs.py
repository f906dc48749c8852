"""The six hooks. Zero implementations of any of them is fine, and none is `firstresult`.

A choice between implementations is made from the data that they return, so that it can be explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from isthmus.config import EngineConfig
    from isthmus.models.registry import ModelRegistry
    from isthmus.ops.registry import KernelRegistry
    from isthmus.platforms import Platform
    from isthmus.plugins.commands import CommandRegistry
    from isthmus.plugins.entry import PlatformEntry
    from isthmus.plugins.policy import PolicyRegistry

hookspec = pluggy.HookspecMarker("isthmus")


def deprecated(what: str, *, use: str, removed_in: str) -> DeprecationWarning:
    """What plugins that still implement a hook are told: `@hookspec(warn_on_impl=deprecated(...))`.

    what: the hook, or "argument 'x' of hook" in `warn_on_impl_args={"x": deprecated(...)}`.
    use: what replaces it.  removed_in: the version of isthmus that no longer has it.
    """
    return DeprecationWarning(f"{what} is deprecated: use {use} instead; isthmus {removed_in} no longer has it")


@hookspec
def isthmus_platforms() -> Sequence[PlatformEntry]:  # type: ignore[empty-body]
    """Offer platforms.

    Called once when the plugins are loaded, in every process, before any device is chosen. Must not import torch
    nor look at the hardware: that is for `PlatformEntry.probe`, which runs later.

    :return: the platforms that this plugin brings; `PlatformEntry.name` is what ``--device`` takes.
    """


@hookspec
def isthmus_register_kernels(registry: KernelRegistry, platform: Platform) -> None:
    """Add providers of ops and attention backends.

    Called once per engine in every worker process, after the platform is chosen and the native ops are defined. All
    plugins are asked, whichever platform was chosen: register only what can run on `platform`.

    :param registry: where `add_op` and `add_attention` put the kernels.
    :param platform: the chosen platform.
    """


@hookspec
def isthmus_register_models(registry: ModelRegistry) -> None:
    """Add model architectures by name, as "module:Class" strings that are imported when a model needs them.

    Called where the model's configuration is read: in the front end and in every worker.

    :param registry: the architectures known so far.
    """


@hookspec
def isthmus_register_commands(registry: CommandRegistry) -> None:
    """Add subcommands of the ``isthmus`` program.

    Called once when the command line starts, before it is parsed. Keep imports inside the command's own function.

    :param registry: where `add` puts a command.
    """


@hookspec
def isthmus_register_policies(registry: PolicyRegistry) -> None:
    """Add scheduling policies.

    Called where an engine core is made, after the configuration is resolved.

    :param registry: where `register` puts a policy under the name that ``scheduler.policy`` takes.
    """


@hookspec
def isthmus_stat_loggers(config: EngineConfig) -> Sequence[Any]:  # type: ignore[empty-body]
    """Offer sinks for the engine's statistics.

    Called once per engine, in the front-end process.

    :param config: the resolved configuration.
    :return: stat loggers, in the order in which they are to be called; empty for none.
    """
