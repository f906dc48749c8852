"""Every error that isthmus raises on purpose.

    IsthmusError
    ├── ConfigError(ValueError)              one or more settings are wrong; `.problems` lists them all
    ├── PluginError                          a plugin broke its contract
    ├── PlatformError(RuntimeError)
    │   ├── UnknownPlatformError             no installed plugin has this name
    │   ├── NoPlatformError                  known, but not usable on this machine; carries every reason
    │   └── AmbiguousPlatformError           two equally good platforms; the user must choose
    ├── KernelError                          no provider of an op or attention fits; carries every reason
    ├── ModelError
    │   ├── ModelNotFoundError               neither a path, a named model, nor a reachable hub id
    │   ├── CheckpointError                  a file or tensor is missing, left over or malformed
    │   └── UnsupportedModelError            no model class for this architecture, or an unknown variant
    ├── RequestError(ValueError)             one request is wrong; the engine and its neighbours go on
    │   ├── InvalidParamsError               a SamplingParams field, or a contradiction between fields
    │   │   └── InvalidGrammarError          a structured output that cannot be compiled, or not within the limits
    │   ├── InvalidPromptError               empty, too long, or ids outside the vocabulary
    │   ├── DuplicateRequestError            the id is already live
    │   ├── QueueFullError                   too many requests wait; carries when to try again
    │   └── NeverFitsError                   needs more KV blocks than the whole pool has
    └── EngineDeadError(RuntimeError)        the engine can no longer run; restart it

Each message names the value, why it is wrong, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class IsthmusError(Exception):
    """Base of the tree."""


class ConfigError(IsthmusError, ValueError):
    """All problems of a configuration at once; `problems` holds one `path=value: why; what to do` a line."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        head = (
            "invalid configuration"
            if len(self.problems) == 1
            else f"invalid configuration ({len(self.problems)} problems)"
        )
        super().__init__(head + "".join(f"\n  {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return (type(self), (self.problems,))


class PluginError(IsthmusError):
    """A plugin failed to load or broke the contract."""


class PlatformError(IsthmusError, RuntimeError):
    """No platform could be chosen or started."""


class UnknownPlatformError(PlatformError):
    """The name is not that of any installed platform."""


class NoPlatformError(PlatformError):
    """Installed, but not usable here."""


class AmbiguousPlatformError(PlatformError):
    """Two or more platforms with the same priority."""


class KernelError(IsthmusError):
    """No provider of an op or attention supports what the model needs."""


class ModelError(IsthmusError):
    """A model could not be found, read or built."""


class ModelNotFoundError(ModelError):
    """Nothing by this name, here or on a reachable hub."""


class CheckpointError(ModelError):
    """A checkpoint is incomplete or malformed."""


class UnsupportedModelError(ModelError):
    """The architecture, or a variant that its config asks for, is not implemented."""


class RequestError(IsthmusError, ValueError):
    """One request is refused; nothing else is affected."""


class InvalidParamsError(RequestError):
    """A sampling parameter is out of range or contradicts another."""


class InvalidGrammarError(InvalidParamsError):
    """The schema, regex, choice or grammar of a structured output is wrong, not supported, or too complex."""


class InvalidPromptError(RequestError):
    """The prompt is empty, too long, or has ids outside the vocabulary."""


class DuplicateRequestError(RequestError):
    """A live request already has this id."""


class NeverFitsError(RequestError):
    """The request needs more KV blocks than exist."""

    def __init__(self, message: str, *, needed_blocks: int, available_blocks: int) -> None:
        super().__init__(message)
        self.needed_blocks = needed_blocks
        self.available_blocks = available_blocks

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (_never_fits, (self.args[0], self.needed_blocks, self.available_blocks))


def _never_fits(message: str, needed_blocks: int, available_blocks: int) -> NeverFitsError:
    return NeverFitsError(message, needed_blocks=needed_blocks, available_blocks=available_blocks)


class QueueFullError(RequestError):
    """The waiting queue has no room; `retry_after_s` is when it is likely to have some."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (_queue_full, (self.args[0], self.retry_after_s))


def _queue_full(message: str, retry_after_s: float) -> QueueFullError:
    return QueueFullError(message, retry_after_s=retry_after_s)


class EngineDeadError(IsthmusError, RuntimeError):
    """A step failed in a way that leaves the engine unusable."""
