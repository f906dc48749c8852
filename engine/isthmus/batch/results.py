"""The file that a batch is answered in: one result a line, whatever happens to the process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from isthmus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one line. status: of the answer, None if the line never became a request; then code and message
    say why not.
    """

    custom_id: str
    status: int | None = None
    request_id: str | None = None
    body: Any = None
    code: str | None = None
    message: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    def as_json(self) -> dict[str, Any]:
        """In the form of OpenAI's output and error files."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        return {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.custom_id,
            "response": None if self.status is None else response,
            "error": None if self.status is not None else {"code": self.code, "message": self.message},
        }


class ResultFile:
    """Appends results, each with one write, so that a process that is killed leaves at most one torn line: the last.
    That one is dropped when the file is opened again. As long as it is open, no other process can have it.

    done: custom_id -> whether it succeeded, of what was there already.

    Raises ConfigError for a file that cannot be used, or that is not the output of such a batch.
    """

    def __init__(self, path: Path, custom_ids: Collection[str]) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._refused(f"cannot be written: {error.strerror}; choose another") from error
        try:
            self._lock()
            self.done: Mapping[str, bool] = self._read(frozenset(custom_ids))
        except BaseException:
            os.close(self._file)
            raise

    def append(self, result: BatchResult) -> None:
        """Write a line. Raises ConfigError if the disk will not have it; no part of it is left then."""
        data = json.dumps(result.as_json(), ensure_ascii=False).encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, before)
            raise self._refused(f"a result cannot be written: {error.strerror}; make room, and run again") from error

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._refused("another process is writing it; wait for that, or choose another") from error

    def _read(self, custom_ids: frozenset[str]) -> dict[str, bool]:
        """What is done, in whole lines; the rest is cut off."""
        done: dict[str, bool] = {}
        end = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                self._note(line, number, custom_ids, done)
                end += len(line)
        os.ftruncate(self._file, end)
        return done

    def _note(self, line: bytes, number: int, custom_ids: frozenset[str], done: dict[str, bool]) -> None:
        try:
            data = json.loads(line)
            custom_id, response = data["custom_id"], data["response"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._refused(f"line {number} is no result of a batch; choose another file") from error
        if custom_id not in custom_ids:
            why = f"line {number} answers {custom_id!r}, which the input does not ask; choose another file"
            raise self._refused(why)
        done[custom_id] = response is not None and response["status_code"] == 200

    def _refused(self, why: str) -> ConfigError:
        return ConfigError([f"--output-file={self._path}: {why}"])
