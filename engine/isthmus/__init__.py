"""Isthmus: an LLM inference engine for which the hardware is a plugin.

Names are loaded when they are first used: importing isthmus costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.async_llm import AsyncLLM
    from isthmus.config import EngineConfig
    from isthmus.engine.request_stream import OutputKind
    from isthmus.llm import LLM
    from isthmus.outputs import CompletionOutput, EmbeddingOutput, FinishReason, Logprob, RequestOutput
    from isthmus.pooling_params import PoolingParams
    from isthmus.sampling_params import BeamSearchParams, SamplingParams
    from isthmus.scheduling_params import SchedulingParams
    from isthmus.structured.spec import StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineConfig",
    "FinishReason",
    "Logprob",
    "OutputKind",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "SchedulingParams",
    "StructuredOutput",
    "__version__",
]

_HOME = {
    "LLM": "isthmus.llm",
    "AsyncLLM": "isthmus.async_llm",
    "BeamSearchParams": "isthmus.sampling_params",
    "CompletionOutput": "isthmus.outputs",
    "EmbeddingOutput": "isthmus.outputs",
    "EngineConfig": "isthmus.config",
    "FinishReason": "isthmus.outputs",
    "Logprob": "isthmus.outputs",
    "OutputKind": "isthmus.engine.request_stream",
    "PoolingParams": "isthmus.pooling_params",
    "RequestOutput": "isthmus.outputs",
    "SamplingParams": "isthmus.sampling_params",
    "SchedulingParams": "isthmus.scheduling_params",
    "StructuredOutput": "isthmus.structured.spec",
}


_OF_SERVER_EXTRA = frozenset({"msgspec", "zmq"})


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name not in _OF_SERVER_EXTRA:
            raise
        raise ImportError(f"isthmus.{name} needs {error.name}; install isthmus[server]") from error


def __dir__() -> list[str]:
    return sorted(__all__)
