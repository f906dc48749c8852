"""The configuration: one frozen tree that is built, checked, resolved and then only read. Costs no torch."""

from isthmus.config.cache import CacheConfig
from isthmus.config.compile import CompileConfig
from isthmus.config.device import DeviceConfig
from isthmus.config.digest import digest
from isthmus.config.engine import EngineConfig, with_values
from isthmus.config.field import AUTO, Auto
from isthmus.config.kernels import KernelConfig
from isthmus.config.kwargs import from_kwargs
from isthmus.config.load import LoadConfig
from isthmus.config.model import ModelConfig
from isthmus.config.observability import ObservabilityConfig
from isthmus.config.parallel import ParallelConfig
from isthmus.config.resolve import ModelFacts, PlatformFacts, Proposal, Provenance, Resolved, Row, describe, resolve
from isthmus.config.scheduler import SchedulerConfig

__all__ = [
    "AUTO",
    "Auto",
    "CacheConfig",
    "CompileConfig",
    "DeviceConfig",
    "EngineConfig",
    "KernelConfig",
    "LoadConfig",
    "ModelConfig",
    "ModelFacts",
    "ObservabilityConfig",
    "ParallelConfig",
    "PlatformFacts",
    "Proposal",
    "Provenance",
    "Resolved",
    "Row",
    "SchedulerConfig",
    "describe",
    "digest",
    "from_kwargs",
    "resolve",
    "with_values",
]
