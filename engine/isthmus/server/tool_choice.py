"""What a request says of tools: whom the model is told of, and what it may or must answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from isthmus.errors import InvalidParamsError
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.server.chat_parser import MessageFormat
from isthmus.server.context import ServerContext
from isthmus.server.errors import ApiError, unsupported
from isthmus.server.protocol.chat import NamedToolChoice, ToolChoice, ToolDefinition
from isthmus.server.reasoning_parser import REASONING_PARSERS, ThinkParser, evident_reasoning_parser
from isthmus.server.tool_parsers.forced import NamedCall, RequiredCalls
from isthmus.server.tool_parsers.registry import TOOL_PARSERS, evident_tool_parser
from isthmus.structured.spec import StructuredOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTO, NONE = "auto", "none"
"""Of the settings: take the parser that is evident from the chat template, or none."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MAX_DEPTH = 128
"""Of parameters, in objects and lists within each other: what follows them takes a level of Python's stack for each."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """tools: that may be called.  choice: "none", "auto", "required", or "named" with one tool.  shown: the tools as
    the chat template takes them, None = it is told of none.  schema: what the whole answer must follow, None = it is
    free.
    """

    tools: tuple[ToolDefinition, ...] = ()
    choice: str = "none"
    is_parallel: bool = True
    shown: list[dict[str, Any]] | None = None
    schema: Mapping[str, Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.function.name for tool in self.tools)


def tool_use(
    tools: Sequence[ToolDefinition] | None,
    choice: ToolChoice | None,
    context: ServerContext,
    *,
    parallel_tool_calls: bool | None = None,
) -> ToolUse:
    """Raises ApiError for tools that are wrong, for a choice that there is not, and for "auto" without a parser."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise _wrong("tool_choice", "there are no tools to choose from; give tools, or leave tool_choice out")
        return ToolUse()
    _check(tools)
    if choice == "none":
        return ToolUse()
    is_parallel = parallel_tool_calls is not False
    shown = [tool.model_dump(exclude_unset=True) for tool in tools]
    if isinstance(choice, NamedToolChoice):
        tool = _named(tools, choice)
        return ToolUse((tool,), "named", is_parallel, shown, _parameters(tool, "#"))
    if choice == "required":
        return ToolUse(tuple(tools), "required", is_parallel, shown, required_schema(tools, is_parallel=is_parallel))
    if tool_parser_name(context) is None:
        raise unsupported(
            "tool_choice",
            "'auto' needs to know how this model writes calls, which its chat template does not tell; start the server "
            f"with --tool-call-parser ({', '.join(TOOL_PARSERS)}), or choose 'required', 'none' or a function",
        )
    return ToolUse(tuple(tools), "auto", is_parallel, shown)


def message_format(use: ToolUse, context: ServerContext, prompt: str, *, is_constrained: bool) -> MessageFormat:
    """How the answers to `prompt` are read. is_constrained: a grammar holds from their first token on, so that they are
    nothing but what it describes.
    """
    max_calls = None if use.is_parallel else 1
    if use.choice in ("required", "named"):
        forced = NamedCall if use.choice == "named" else RequiredCalls
        return MessageFormat(make_tools=partial(forced, use.names), max_calls=max_calls)
    if is_constrained:
        return MessageFormat()
    tools = tool_parser_name(context) if use.choice == "auto" else None
    reasoning = reasoning_parser_name(context)
    return MessageFormat(
        make_reasoning=None if reasoning is None else partial(REASONING_PARSERS[reasoning], prompt),
        make_tools=None if tools is None else partial(TOOL_PARSERS[tools], use.names),
        max_calls=max_calls,
        tags=(*(() if reasoning is None else ThinkParser.tags), *(() if tools is None else TOOL_PARSERS[tools].tags)),
    )


def constraint(use: ToolUse) -> StructuredOutput | None:
    """The grammar that makes the answer follow the schema. Raises ApiError for one that cannot be a grammar."""
    if use.schema is None:
        return None
    try:
        return StructuredOutput(json=use.schema)
    except InvalidParamsError as error:
        raise _wrong("tools", f"their parameters make no schema: {error}") from error


def is_constrained(params: SamplingParams | BeamSearchParams) -> bool:
    """Whether a grammar holds."""
    return isinstance(params, SamplingParams) and params.structured is not None


def with_tags(
    params: SamplingParams | BeamSearchParams, form: MessageFormat, tokenizer: PreTrainedTokenizerBase
) -> SamplingParams | BeamSearchParams:
    """Parameters that leave what the parsers look for in the text. Of some models these are special tokens."""
    if not form.tags or not params.skip_special_tokens:
        return params
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return params if special.isdisjoint(form.tags) else replace(params, skip_special_tokens=False)


def tool_parser_name(context: ServerContext) -> str | None:
    """The parser of this server's model."""
    setting = context.settings.tool_call_parser
    return evident_tool_parser(_template(context)) if setting == AUTO else None if setting == NONE else setting


def reasoning_parser_name(context: ServerContext) -> str | None:
    """The same for reasoning."""
    setting = context.settings.reasoning_parser
    return evident_reasoning_parser(_template(context)) if setting == AUTO else None if setting == NONE else setting


def required_schema(tools: Sequence[ToolDefinition], *, is_parallel: bool) -> dict[str, Any]:
    """One call or more, each of one of the tools."""
    calls = [_call_schema(tool, f"#/items/anyOf/{index}/properties/arguments") for index, tool in enumerate(tools)]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | ({} if is_parallel else {"maxItems": 1})


def _call_schema(tool: ToolDefinition, path: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": _parameters(tool, path)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(tool: ToolDefinition, path: str) -> Mapping[str, Any]:
    """The schema of the arguments, to stand at `path` of a larger one."""
    parameters = tool.function.parameters
    return _NO_PARAMETERS if parameters is None else _moved({"type": "object", **parameters}, path)


def _moved(schema: Any, path: str) -> Any:
    """With references that hold when the schema stands at `path`."""
    if isinstance(schema, list):
        return [_moved(item, path) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(item, path) for key, item in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = path + target[1:]
    return moved


def _template(context: ServerContext) -> str:
    template = context.settings.chat_template or context.llm.tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def _check(tools: Sequence[ToolDefinition]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        path, name = f"tools.{index}", tool.function.name
        if tool.type != "function":
            raise unsupported(f"{path}.type", f"{tool.type!r} is not supported; this server knows 'function' only")
        if not _NAME.fullmatch(name):
            raise _wrong(f"{path}.function.name", f"{name!r} must be 1 to 64 letters of a-z, A-Z, 0-9, '_', '-', '.'")
        if _is_deep(tool.function.parameters, MAX_DEPTH):
            raise _wrong(f"{path}.function.parameters", f"nested more than {MAX_DEPTH} levels deep; make it flatter")
        if name in seen:
            raise _wrong(f"{path}.function.name", f"{name!r} is there twice; give each tool a name of its own")
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise _wrong(f"{path}.function.parameters", f"type {kind!r}: arguments are an object; set 'object'")
        seen.add(name)


def _is_deep(value: Any, room: int) -> bool:
    """Whether there are more than `room` levels."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return room < 0 or any(_is_deep(child, room - 1) for child in children)


def _named(tools: Sequence[ToolDefinition], choice: NamedToolChoice) -> ToolDefinition:
    if choice.type != "function":
        raise unsupported("tool_choice.type", f"{choice.type!r} is not supported; this server knows 'function' only")
    name = choice.function.name
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise _wrong("tool_choice", f"{name!r} is none of the tools; choose one of them, or give it in tools")


def _wrong(path: str, why: str) -> ApiError:
    return ApiError(400, f"{path}: {why}", param=path.split(".")[0], code="invalid_value")
