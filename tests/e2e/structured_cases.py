"""Structured outputs that end soon whatever the model likes, and how to tell that a text is one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from isthmus import StructuredOutput

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[A-Z][a-z]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "sea"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
PATTERN = r"[a-c]{2,4}(-[0-9]{1,3})?"
CHOICES = ("the sea", "the river", "no", 'a "b"', "é")
EBNF = 'root ::= term ("+" term){1,3}\nterm ::= [0-9] | "(" term ")"'


@dataclass(frozen=True)
class Case:
    """follows: whether a text is one that may come back."""

    spec: StructuredOutput
    follows: Callable[[str], bool]


def follows_schema(text: str) -> bool:
    return Draft202012Validator(PERSON).is_valid(json.loads(text))


def follows_ebnf(text: str) -> bool:
    term = r"(?:\d|\(\d\)|\(\(+\d\)+\))"
    return bool(re.fullmatch(rf"{term}(?:\+{term}){{1,3}}", text)) and text.count("(") == text.count(")")


CASES = {
    "json": Case(StructuredOutput(json=PERSON, disable_any_whitespace=True), follows_schema),
    "regex": Case(StructuredOutput(regex=PATTERN), lambda text: bool(re.fullmatch(PATTERN, text))),
    "choice": Case(StructuredOutput(choice=CHOICES), lambda text: text in CHOICES),
    "grammar": Case(StructuredOutput(grammar=EBNF), follows_ebnf),
}
