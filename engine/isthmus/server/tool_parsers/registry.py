"""Which formats there are, and which one a chat template asks the model for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from isthmus.server.tool_parsers.base import ToolParser
from isthmus.server.tool_parsers.hermes import HermesParser
from isthmus.server.tool_parsers.llama3_json import Llama3JsonParser
from isthmus.server.tool_parsers.mistral import MistralParser
from isthmus.server.tool_parsers.pythonic import PythonicParser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "hermes": HermesParser,
        "llama3_json": Llama3JsonParser,
        "mistral": MistralParser,
        "pythonic": PythonicParser,
    }
)
"""A new format is a file and an entry here."""
_OTHER_FORMATS = ("<function=", "<arg_key>", "<parameter=")
"""Of templates that also write <tool_call>, but no JSON in it."""


def evident_tool_parser(template: str) -> str | None:
    """The format that a chat template writes and asks for; None if there is no telling."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return None if any(mark in template for mark in _OTHER_FORMATS) else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "func_name1(params_name1=params_value1" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '{"name": function name, "parameters":' in template:
        return "llama3_json"
    return None
