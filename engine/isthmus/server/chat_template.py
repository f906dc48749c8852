"""Messages to a prompt, by the model's chat template."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from isthmus.async_llm import AsyncLLM
from isthmus.server.errors import ApiError, unsupported
from isthmus.server.prompts import LONG_TEXT, EncodedPrompt, encode
from isthmus.server.protocol.chat import ChatMessage, ContentPart, TemplateFields
from isthmus.server.tool_turns import with_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def render(
    llm: AsyncLLM,
    messages: Sequence[ChatMessage],
    fields: TemplateFields,
    *,
    chat_template: str | None,
    tools: list[Any] | None,
) -> EncodedPrompt:
    """The conversation as token ids. chat_template: in place of the model's own.  tools: that the model is told of.

    Raises ApiError for messages that the template refuses, or that are not text.
    """
    if fields.add_generation_prompt and fields.continue_final_message:
        message = "continue_final_message goes on with the last message, so add_generation_prompt must be false"
        raise ApiError(400, message, param="continue_final_message", code="invalid_value")
    tokenizer = llm.tokenizer
    if chat_template is None and not tokenizer.chat_template:
        raise unsupported(
            "messages", "the model has no chat template; use /v1/completions, or start with --chat-template"
        )
    extra = fields.chat_template_kwargs or {}
    _check_names(tokenizer, extra)
    turns = [_plain(message, index) for index, message in enumerate(messages)]

    def apply() -> str:
        text = tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            documents=fields.documents,
            tools=tools,
            chat_template=chat_template,
            **extra,
        )
        return str(text)

    is_long = sum(len(turn.get("content") or "") for turn in turns) > LONG_TEXT
    try:
        text = await asyncio.to_thread(apply) if is_long else apply()
    except (TemplateError, TypeError, ValueError, KeyError, IndexError, RecursionError) as error:
        # A template is a program that somebody else wrote: what it makes of messages that it did not expect is its own.
        message = f"messages: the chat template refuses this conversation: {type(error).__name__}: {error}"
        raise ApiError(400, message, param="messages", code="invalid_value") from error
    return await encode(llm, text, add_special_tokens=bool(fields.add_special_tokens))


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """As templates take it: text for content, whatever the form in which it came."""
    turn = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        turn["content"] = "\n".join(
            _text(part, f"messages.{index}.content.{at}") for at, part in enumerate(message.content)
        )
    return with_calls(turn, f"messages.{index}")


def _text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise unsupported(f"{path}.type", f"{part.type!r} is not supported by this model; send parts of type 'text'")
    if part.text is None:
        raise ApiError(400, f"{path}.text: a part of type 'text' needs a text", param="messages", code="invalid_value")
    return part.text


def _check_names(tokenizer: PreTrainedTokenizerBase, extra: dict[str, Any]) -> None:
    """Arguments of the method itself are none of the client's business."""
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in extra:
        if name in reserved:
            raise unsupported(f"chat_template_kwargs.{name}", "is not a variable of chat templates; leave it out")
