"""What an output must look like, as a request says it. Free of torch and of the library that compiles it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.errors import InvalidParamsError

MAX_SCHEMA_BYTES = 128 * 1024
"""Of a JSON schema, or of all choices together."""
MAX_PATTERN_BYTES = 32 * 1024
"""Of a regex or a grammar: what these cost grows faster than their length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The whole output must be one of the texts that exactly one of the first five fields allows.

    json: a JSON schema (draft 2020-12), as an object or as its text; it is kept as text. What of it cannot be enforced
    is refused, not ignored.
    json_object: any JSON object.
    regex: in the syntax of Rust's regex crate, without look-around and back-references; the whole output must match.
    choice: one of these texts; they are kept as a tuple.
    grammar: EBNF as llama.cpp writes it (GBNF; the first rule is `root`), or in Lark's syntax (it is `start`).
    whitespace_pattern: of JSON: a regex of what may stand between its tokens, instead of up to 32 blanks and line ends.
    disable_any_whitespace: of JSON: nothing may.

    Raises InvalidParamsError for what can be seen to be wrong without compiling it.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise self._wrong(name, "must be True or False")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise self._wrong(name, "must be text, and not empty; leave it out if there is none")
        self._check_count()
        self._check_whitespace()
        if self.json is not None:
            object.__setattr__(self, "json", self._schema_text())
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices())
        for name in ("json", "regex", "choice", "grammar", "whitespace_pattern"):
            self._check_size(name)

    @property
    def kind(self) -> str:
        """The one field of the first five that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        names = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        return names + ["json_object"] * self.json_object

    def _schema_text(self) -> str:
        """Properties stay in their order, which is the order in which they will be written."""
        schema = self.json
        try:
            if isinstance(schema, str):
                schema = json.loads(schema)
            if schema is True:
                schema = {}
            if not isinstance(schema, Mapping):
                kind = "false, which allows nothing" if schema is False else f"a {type(schema).__name__}"
                raise self._wrong("json", f"the JSON schema must be an object or true, not {kind}")
            return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidParamsError):
                raise
            raise self._wrong("json", f"is not JSON: {error}; give a schema, as an object or as its text") from None

    def _choices(self) -> tuple[str, ...]:
        choice = self.choice
        if isinstance(choice, str | bytes) or not isinstance(choice, Sequence) or not choice:
            raise self._wrong("choice", "must be a list of at least one text")
        if not all(isinstance(text, str) and text for text in choice):
            raise self._wrong("choice", "each must be text, and not empty")
        return tuple(choice)

    def _check_count(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise InvalidParamsError(
                f"StructuredOutput: {' and '.join(given) or 'nothing'} given; give exactly one of json, json_object, "
                "regex, choice and grammar"
            )

    def _check_whitespace(self) -> None:
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            if getattr(self, name) and self.kind not in ("json", "json_object"):
                raise self._wrong(name, "is for JSON only; leave it out")
        if self.whitespace_pattern and self.disable_any_whitespace:
            raise self._wrong("whitespace_pattern", "contradicts disable_any_whitespace; leave one of them out")

    def _check_size(self, name: str) -> None:
        value = getattr(self, name)
        text = "".join(value or ())
        limit = MAX_SCHEMA_BYTES if name in ("json", "choice") else MAX_PATTERN_BYTES
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise self._wrong(name, "is no Unicode text: it has half of a surrogate pair") from None
        if num_bytes > limit:
            raise self._wrong(name, f"has {num_bytes} bytes, {limit} are allowed; make it smaller")

    def _wrong(self, name: str, why: str) -> InvalidParamsError:
        return InvalidParamsError(f"StructuredOutput.{name}={reprlib.repr(getattr(self, name))}: {why}")


def _plain(value: Any) -> Any:
    """Mappings and sequences of any kind."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
