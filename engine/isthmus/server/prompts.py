"""Text and messages to token ids, off the event loop where that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.async_llm import AsyncLLM
from isthmus.server.errors import ApiError
from isthmus.server.protocol.common import is_unicode

LONG_TEXT = 16_384
"""In characters: what takes a tokenizer some milliseconds."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """text: None if it was given as ids."""

    token_ids: list[int]
    text: str | None = None

    def for_engine(self) -> dict[str, Any]:
        """As AsyncLLM takes it."""
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


async def encode(llm: AsyncLLM, text: str, *, add_special_tokens: bool) -> EncodedPrompt:
    """The text as token ids. Raises ApiError for half of a surrogate pair."""
    if not is_unicode(text):
        raise ApiError(400, "the prompt is no Unicode text: it has half of a surrogate pair", code="invalid_prompt")
    tokenizer = llm.tokenizer

    def ids() -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return found

    return EncodedPrompt(ids() if len(text) <= LONG_TEXT else await asyncio.to_thread(ids), text)


def fitted(
    prompt: EncodedPrompt, llm: AsyncLLM, *, param: str, keep_last: int | None = None, has_answer: bool = True
) -> EncodedPrompt:
    """The prompt, with `keep_last` only its last so many ids; -1 are as many as fit.

    Raises ApiError for one that leaves no room for an answer.
    """
    longest = llm.limits.max_model_len
    room = longest - 1 if has_answer else longest
    if keep_last is not None:
        prompt = _last_ids(prompt, room if keep_last == -1 else keep_last)
    num_tokens = len(prompt.token_ids)
    if num_tokens > room:
        raise ApiError(
            400,
            f"the maximum context length is {longest} tokens"
            f"{', of which one at least is for the answer' if has_answer else ''}; the prompt has "
            f"{num_tokens} tokens: shorten it, or ask for truncate_prompt_tokens",
            param=param,
            code="context_length_exceeded",
        )
    return prompt


def _last_ids(prompt: EncodedPrompt, count: int) -> EncodedPrompt:
    if count < 1:
        message = f"truncate_prompt_tokens={count}: must be >= 1, or -1 for as many as fit"
        raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")
    if len(prompt.token_ids) <= count:
        return prompt
    return EncodedPrompt(prompt.token_ids[-count:])


def text_of(prompt: EncodedPrompt, llm: AsyncLLM) -> str:
    """The prompt's text; of ids, what they decode to."""
    if prompt.text is not None:
        return prompt.text
    return str(llm.tokenizer.decode(prompt.token_ids, skip_special_tokens=False))


def listed(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """The prompts of `prompt`, which may be one or several. Raises ApiError if it is none."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt: must not be empty; give a text, token ids, or a list of these", param="prompt")
    ids_or_prompts: list[Any] = list(prompt)
    return [ids_or_prompts] if isinstance(prompt[0], int) else ids_or_prompts
