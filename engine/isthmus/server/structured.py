"""What a request says of its output's form, in OpenAI's words or in vLLM's, old and new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isthmus.errors import InvalidParamsError
from isthmus.server.errors import ApiError, unsupported
from isthmus.server.protocol.common import ResponseFormat, SamplingFields, StructuredFields
from isthmus.structured.spec import StructuredOutput

SAME_NAME = ("json_object", "regex", "choice", "grammar", "whitespace_pattern", "disable_any_whitespace")
"""Fields of `structured_outputs` that are fields of StructuredOutput; `json` is the other one."""
OLDER_NAMES = ("json", "regex", "choice", "grammar")
"""guided_json and so on."""


def structured_output(body: SamplingFields) -> StructuredOutput | None:
    """None: any text will do. Raises ApiError, also if it is said twice."""
    said = list(_said(body))
    if not said:
        return None
    if len(said) > 1:
        names = " and ".join(name for name, _ in said)
        raise ApiError(400, f"{names} are given, and both say what the output must be; leave one out", param=said[1][0])
    [(param, fields)] = said
    try:
        return StructuredOutput(**fields)
    except InvalidParamsError as error:
        message = str(error).removeprefix("StructuredOutput.")
        raise ApiError(400, f"{param}: {message}", param=param, code="invalid_value") from error


def _said(body: SamplingFields) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the field's name, what is says in the words of StructuredOutput)."""
    if body.response_format is not None:
        fields = _of_response_format(body.response_format)
        if fields:
            yield "response_format", fields
    if body.structured_outputs is not None:
        fields = _of_structured_outputs(body.structured_outputs)
        if fields:
            yield "structured_outputs", fields
    for name in OLDER_NAMES:
        value = getattr(body, f"guided_{name}")
        if value is not None:
            fields = {name: value}
            if body.guided_whitespace_pattern is not None:
                fields["whitespace_pattern"] = body.guided_whitespace_pattern
            yield f"guided_{name}", fields


def _of_response_format(given: ResponseFormat) -> dict[str, Any]:
    if given.type == "text":
        return {}
    if given.type == "json_object":
        return {"json_object": True}
    if given.json_schema is None or given.json_schema.definition is None:
        raise ApiError(
            400,
            "response_format: type json_schema needs json_schema.schema; give the schema, or use json_object",
            param="response_format",
            code="invalid_value",
        )
    return {"json": given.json_schema.definition}


def _of_structured_outputs(given: StructuredFields) -> dict[str, Any]:
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(given, name):
            raise unsupported(f"structured_outputs.{name}", "this server does not support it; leave it out")
    values = {name: getattr(given, name) for name in SAME_NAME} | {"json": given.json_}
    return {name: value for name, value in values.items() if value is not None and value is not False}
