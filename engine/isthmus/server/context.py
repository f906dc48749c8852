"""What all routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from isthmus import __version__
from isthmus.async_llm import AsyncLLM
from isthmus.config.digest import digest
from isthmus.errors import EngineDeadError
from isthmus.server.errors import ApiError
from isthmus.server.generation_config import recommended_sampling
from isthmus.server.journal import Journal
from isthmus.server.metrics import Metrics
from isthmus.server.settings import ServerSettings
from isthmus.server.tracing import Tracing


@dataclass(slots=True)
class ServerContext:
    """Once the engine is ready, sampling_defaults is what generation_config.json says, and fingerprint changes with the
    version and with each setting, as answers may.  num_open: requests for text that are being served.
    """

    llm: AsyncLLM
    settings: ServerSettings
    metrics: Metrics
    journal: Journal = field(default_factory=Journal)
    tracing: Tracing | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = f"isthmus-{__version__}"
    created_s: int = field(default_factory=lambda: int(time.time()))
    num_open: int = 0

    async def learn(self) -> None:
        """What can be known from now on: the engine is ready."""
        config = self.llm.config
        self.fingerprint = f"isthmus-{__version__}-{digest(config)[:8]}"
        if self.settings.use_generation_config:
            self.sampling_defaults = await asyncio.to_thread(recommended_sampling, config)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        try:
            self.llm.check_health()
        except EngineDeadError:
            return False
        return True

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served, and EngineDeadError while none is."""
        names = self.settings.served_model_names
        if name is not None and name not in names:
            message = f"model {name!r} is not served here; use {' or '.join(map(repr, names))}"
            raise ApiError(404, message, param="model", code="model_not_found")
        self.llm.check_health()


async def context_of(request: Request) -> ServerContext:
    """The context of the application that the request came to."""
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(context_of)]
"""The type of a route's parameter that gets it."""
