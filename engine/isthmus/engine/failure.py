"""How an exception gets from an engine to its front end."""

from __future__ import annotations

import logging
import pickle

from isthmus.errors import EngineDeadError, IsthmusError

logger = logging.getLogger(__name__)


def pickled_failure(error: Exception) -> bytes:
    """Of a start that failed: as itself if it is one of ours, else as an EngineDeadError that names it, because its
    class may not exist on the other side. Its trace is in the engine's log.
    """
    if isinstance(error, IsthmusError):
        return pickle.dumps(error)
    logger.error("the engine did not start", exc_info=error)
    return pickle.dumps(EngineDeadError(f"the engine did not start: {type(error).__name__}: {error}"))
