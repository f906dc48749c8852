"""Text that the user gives in files and on stdin."""

from __future__ import annotations

import sys

from isthmus.errors import InvalidPromptError

STDIN = "-"


def read_text(path: str) -> str:
    """The UTF-8 text of a file, or of stdin for "-", without the line end that closes its last line.

    Raises InvalidPromptError if it cannot be read or is no UTF-8.
    """
    try:
        if path == STDIN:
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise InvalidPromptError(f"cannot read {path!r}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise InvalidPromptError(
            f"{path!r} is not UTF-8 text: {error.reason} at byte {error.start}; convert it to UTF-8"
        ) from error
