"""How the server's log looks: lines to read, or a JSON object a line."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from isthmus.server.request_log import REQUEST_ID

LOGGERS = ("isthmus", "uvicorn")


@contextmanager
def server_logs(*, as_json: bool) -> Iterator[None]:
    """All that our loggers and uvicorn's say goes to stderr, in one form; afterwards it goes where it went before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else TextLines())
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate


class TextLines(logging.Formatter):
    """`2026-12-01T12:00:00.123Z info: message name=value ... request_id=...`"""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = "".join(f" {name}={value}" for name, value in _fields_of(record).items())
        line = f"{time} {record.levelname.lower()}: {record.getMessage()}{fields}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """time (seconds since 1970), level, logger, message, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """`extra={"fields": ...}` of whoever logged, and the request's id."""
    fields: dict[str, object] = {
        name: value for name, value in getattr(record, "fields", {}).items() if value is not None
    }
    request_id = REQUEST_ID.get()
    return fields if request_id is None else {**fields, "request_id": request_id}
