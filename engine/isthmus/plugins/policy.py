"""The contract of scheduling policies, and the registry that plugins fill. Torch-free.

A policy keeps the waiting requests in its order and answers three questions: who is next, who gives way, and whether
a waiting request may take a running one's place. Everything else (budgets, blocks, swaps) is the scheduler's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from isthmus.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from isthmus.config import SchedulerConfig

RequestView = Any
"""A request as a policy may read it: `request_id`, `arrival_s` (monotonic seconds), `priority` (lower goes first),
`tenant`, `num_tokens`, `num_prompt_tokens`, `num_computed_tokens`, `num_preemptions`. Of these a policy changes none;
`claim` is the policy's own, for what it wants to remember of the request.
"""


class SchedulingPolicy(ABC):
    """Holds the waiting requests, preempted ones included. Every method but `head` is called with live requests only.

    Adding, removing and `head(1)` must not cost more for a longer queue (O(log n) is fine): they run every step.
    """

    preempts: ClassVar[bool] = False
    """Whether `outranks` is ever true; if not it is not asked."""
    charges: ClassVar[bool] = False
    """Whether `charge` wants to be told of the tokens of each step."""

    @abstractmethod
    def add(self, request: RequestView) -> None:
        """A new request."""

    @abstractmethod
    def add_preempted(self, request: RequestView) -> None:
        """A victim comes back: to the front of its class, so that it does not lose its place to later arrivals."""

    @abstractmethod
    def head(self, count: int) -> Sequence[RequestView]:
        """The first `count` waiting requests in the order of admission; fewer if fewer wait."""

    @abstractmethod
    def remove(self, request: RequestView) -> None:
        """Admitted or aborted."""

    @abstractmethod
    def choose_victim(self, running: Sequence[RequestView]) -> RequestView:
        """Who of `running`, which is in admission order and not empty, gives up its place."""

    def outranks(self, waiting: RequestView, running: RequestView) -> bool:
        """Whether `waiting` may take the place of `running`. Must be a strict order that time does not turn around,
        or the two would drive each other out for ever. Default: never.
        """
        return False

    def may_overtake(self, head: RequestView, request: RequestView) -> bool:
        """Whether `request`, which fits, may pass `head`, which does not. The scheduler bounds how often.

        Default: yes.
        """
        return True

    def charge(self, scheduled: Iterable[tuple[RequestView, int]]) -> None:
        """(request, tokens) of a step that was just scheduled. Default: nothing."""
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestView]:
        """All waiting requests in the order of admission."""
        return iter(self.head(len(self)))


PolicyFactory = Callable[["SchedulerConfig"], SchedulingPolicy]


@dataclass
class PolicyRegistry:
    """Policy name -> what makes one from the scheduler's settings."""

    _factories: dict[str, PolicyFactory] = field(default_factory=dict)

    def register(self, name: str, factory: PolicyFactory) -> None:
        """Add a policy. Raises PluginError if the name is taken."""
        if name in self._factories:
            raise PluginError(f"scheduling policy {name!r} is already registered; choose another name")
        self._factories[name] = factory

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._factories))

    def make(self, config: SchedulerConfig) -> SchedulingPolicy:
        """The policy that `scheduler.policy` names. Raises ConfigError for an unknown name."""
        factory = self._factories.get(config.policy)
        if factory is None:
            raise ConfigError(
                [f"scheduler.policy={config.policy}: is not installed; use one of {', '.join(self.names)}"]
            )
        return factory(config)

    @classmethod
    def of(cls, factories: Mapping[str, PolicyFactory]) -> PolicyRegistry:
        """A registry of these policies only."""
        return cls(dict(factories))
