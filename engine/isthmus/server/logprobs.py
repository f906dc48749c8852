"""Log-probabilities in the three forms that clients know."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.outputs import Logprob, TokenLogprobs
from isthmus.server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from isthmus.server.protocol.common import Candidate, PromptLogprobs
from isthmus.server.protocol.completion import CompletionLogprobs
from isthmus.server.token_names import TokenNames, id_name

LEAST = -9999.0
"""Stands for minus infinity, which JSON has not."""


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], positions: Sequence[TokenLogprobs], top: int
) -> ChatLogprobs:
    """Of each token, and of the `top` most likely ones at its position."""
    return ChatLogprobs(content=[_chat_position(names, *each, top) for each in zip(token_ids, positions, strict=True)])


def _chat_position(names: TokenNames, token_id: int, position: TokenLogprobs, top: int) -> TokenLogprob:
    chosen = position[token_id]
    return TokenLogprob(
        token=names.name(token_id, chosen.decoded_token),
        logprob=_finite(chosen),
        bytes=names.raw(token_id, chosen.decoded_token),
        top_logprobs=[
            TopLogprob(
                token=names.name(candidate_id, candidate.decoded_token),
                logprob=_finite(candidate),
                bytes=names.raw(candidate_id, candidate.decoded_token),
            )
            for candidate_id, candidate in list(position.items())[:top]
        ],
    )


def completion_logprobs(
    names: TokenNames, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None], top: int, offset: int
) -> tuple[CompletionLogprobs, int]:
    """The same, and the offset after the last token. A position of None is that of a token nobody chose: the first of a
    prompt. offset: of the first token, in characters of the text.
    """
    found = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = None if position is None else position[token_id]
        text = names.text(token_id) if chosen is None else chosen.decoded_token
        found.text_offset.append(offset)
        found.tokens.append(names.distinct(token_id, text))
        found.token_logprobs.append(None if chosen is None else _finite(chosen))
        found.top_logprobs.append(None if position is None else _named(names, position, top, token_id))
        offset += len(text or "")
    return found, offset


def _named(names: TokenNames, position: TokenLogprobs, top: int, chosen_id: int) -> dict[str, float]:
    """The `top` most likely ones and the chosen one, whose names may not hide each other."""
    named: dict[str, float] = {}
    for number, (token_id, candidate) in enumerate(position.items()):
        if number < top or token_id == chosen_id:
            name = names.distinct(token_id, candidate.decoded_token)
            named[id_name(token_id) if name in named else name] = _finite(candidate)
    return named


def prompt_logprobs(positions: Sequence[TokenLogprobs | None] | None) -> PromptLogprobs | None:
    """As vLLM tells them."""
    if positions is None:
        return None
    return [None if position is None else _by_id(position) for position in positions]


def _by_id(position: TokenLogprobs) -> dict[str, Candidate]:
    return {
        str(token_id): Candidate(logprob=_finite(each), rank=each.rank, decoded_token=each.decoded_token)
        for token_id, each in position.items()
    }


def _finite(candidate: Logprob) -> float:
    return max(candidate.logprob, LEAST)
