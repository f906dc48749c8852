"""Isthmus: an LLM inference engine for which the hardware is a plugin.

Names are loaded when they are first used: importing isthmus costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.config import EngineConfig
    from isthmus.llm import LLM
    from isthmus.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
    from isthmus.sampling_params import BeamSearchParams, SamplingParams
    from isthmus.scheduling_params import SchedulingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "FinishReason",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SchedulingParams",
    "__version__",
]

_HOME = {
    "LLM": "isthmus.llm",
    "BeamSearchParams": "isthmus.sampling_params",
    "CompletionOutput": "isthmus.outputs",
    "EngineConfig": "isthmus.config",
    "FinishReason": "isthmus.outputs",
    "Logprob": "isthmus.outputs",
    "RequestOutput": "isthmus.outputs",
    "SamplingParams": "isthmus.sampling_params",
    "SchedulingParams": "isthmus.scheduling_params",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
