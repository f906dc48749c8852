"""Plugin of the built-in scheduling policies."""

from __future__ import annotations

from isthmus.plugins import hookimpl
from isthmus.plugins.policy import PolicyRegistry
from isthmus.scheduler.policies.fair import FairPolicy
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.policies.priority import PriorityPolicy
from isthmus.scheduler.policies.sjf import ShortestFirstPolicy


@hookimpl
def isthmus_register_policies(registry: PolicyRegistry) -> None:
    registry.register("fcfs", FcfsPolicy)
    registry.register("priority", PriorityPolicy)
    registry.register("sjf", ShortestFirstPolicy)
    registry.register("fair", FairPolicy)
