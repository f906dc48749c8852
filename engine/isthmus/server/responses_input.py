"""Input items of `/v1/responses` as the messages of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isthmus.server.errors import ApiError, unsupported
from isthmus.server.protocol.chat import (
    ChatMessage,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    ToolChoice,
    ToolDefinition,
)
from isthmus.server.protocol.responses import ChosenFunction, FunctionTool, InputItem, InputPart, ResponsesRequest

SYSTEM, ASSISTANT = "system", "assistant"
_ROLES = {"user": "user", "assistant": ASSISTANT, "system": SYSTEM, "developer": SYSTEM}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def input_items(body: ResponsesRequest) -> list[InputItem]:
    """What the request adds to the conversation. Raises ApiError if that is nothing."""
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    if not body.input:
        raise _wrong("input", "must not be empty; give a text or items")
    return list(body.input)


def messages_of(items: Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    """The conversation. What the model said, thought and called in one turn is one message, as chat templates have it;
    so are the instructions and the system messages that follow them.

    Raises ApiError for an item that is no text, call or result, or is not whole.
    """
    turns = _Turns()
    if instructions is not None:
        turns.say(SYSTEM, instructions)
    for index, item in enumerate(items):
        _add(turns, item, f"input.{index}")
    return [ChatMessage(**turn) for turn in turns.found]


def tool_definitions(tools: Sequence[FunctionTool] | None) -> list[ToolDefinition]:
    """As chat completions have them. Raises ApiError for one that is no function."""
    found = []
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise unsupported(
                f"tools.{index}.type", f"{tool.type!r} is not supported; this server knows 'function' only"
            )
        function = {
            name: value for name in FunctionDefinition.model_fields if (value := getattr(tool, name)) is not None
        }
        if "name" not in function:
            raise _wrong("tools", f"tool {index} has no name; give it one")
        found.append(ToolDefinition(type=tool.type, function=FunctionDefinition(**function)))
    return found


def tool_choice(choice: str | ChosenFunction | None) -> ToolChoice | None:
    """As chat completions have it."""
    if isinstance(choice, ChosenFunction):
        return NamedToolChoice(type=choice.type, function=FunctionName(name=choice.name))
    return choice  # type: ignore[return-value]  # pydantic has checked the word


class _Turns:
    """Messages, the last of which may still grow. reasoning: what was thought before the next thing that is said."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self._reasoning = ""

    def say(self, role: str, text: str) -> None:
        last = self.found[-1] if self.found else None
        if role == SYSTEM and last is not None and last["role"] == SYSTEM:
            last["content"] += f"\n\n{text}"
        elif role == ASSISTANT:
            self.found.append({"role": role, "content": text, **self._thought()})
        else:
            self.found.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        self._reasoning += text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        last = self.found[-1] if self.found else None
        if last is None or last["role"] != ASSISTANT:
            last = {"role": ASSISTANT, "content": "", **self._thought()}
            self.found.append(last)
        function = {"name": name, "arguments": arguments}
        last.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        self.found.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _thought(self) -> dict[str, str]:
        reasoning, self._reasoning = self._reasoning, ""
        return {"reasoning_content": reasoning} if reasoning else {}


def _add(turns: _Turns, item: InputItem, path: str) -> None:
    match item.type:
        case None | "message":
            if item.role not in _ROLES:
                raise _wrong(path, f"role {item.role!r} must be one of {', '.join(_ROLES)}")
            turns.say(_ROLES[item.role], _text(item.content, f"{path}.content"))
        case "function_call":
            if item.call_id is None or item.name is None or item.arguments is None:
                raise _wrong(path, "a function_call needs call_id, name and arguments")
            turns.call(item.call_id, item.name, item.arguments)
        case "function_call_output":
            if item.call_id is None:
                raise _wrong(path, "a function_call_output needs the call_id of its call")
            turns.result(item.call_id, _text(item.output, f"{path}.output"))
        case "reasoning":
            turns.think(_text(item.content or [], f"{path}.content"))
        case _:
            raise unsupported(f"{path}.type", f"{item.type!r} is not supported; send messages, calls and their results")


def _text(content: str | Sequence[InputPart] | None, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise _wrong(path, "is missing; give a text or parts of type 'input_text'")
    return "\n".join(_part_text(part, f"{path}.{index}") for index, part in enumerate(content))


def _part_text(part: InputPart, path: str) -> str:
    if part.type not in _TEXT_PARTS:
        raise unsupported(
            f"{path}.type", f"{part.type!r} is not supported by this model; send parts of type 'input_text'"
        )
    if part.text is None:
        raise _wrong(path, f"a part of type {part.type!r} needs a text")
    return part.text


def _wrong(path: str, why: str) -> ApiError:
    return ApiError(400, f"{path}: {why}", param=path.partition(".")[0], code="invalid_value")
