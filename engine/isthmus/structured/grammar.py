"""A compiled grammar, and how far one output has got in it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from isthmus.errors import InvalidGrammarError
from isthmus.structured.ebnf import to_lark
from isthmus.structured.spec import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MaskWords = npt.NDArray[np.int32]
"""[V / 32]: bit i of word w stands for token 32 * w + i; 1 = allowed."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""A model that likes blanks must not be able to write nothing else until its tokens are used up."""
ANY_OBJECT = '{"type":"object"}'
MAX_ROW_ITEMS = 10_000
"""What the output may be at one moment, for the parser: an optional property counts four times."""
MAX_TOKEN_S = 0.1
"""Of this thread's processor time, for one token: an ambiguous grammar can cost the square of the output's length,
which nothing in the library limits. All other requests wait meanwhile."""
_MAX_REASON = 500
"""Characters of what the library has to say."""


class Grammar:
    """Shared by all requests that ask for it. Made in any thread; the rest is for the engine's."""

    def __init__(self, spec: StructuredOutput, tokenizer: LLTokenizer) -> None:
        """Compile it, and find the first mask: most grammars that are too much show it there.

        Raises InvalidGrammarError.
        """
        from llguidance import LLMatcher

        self._kind = spec.kind
        self._eos_words = _words(tokenizer.eos_tokens, tokenizer.vocab_size)
        try:
            source = _source(spec)
        except ValueError as error:
            raise self._invalid(str(error)) from error
        self._matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        self._check(self._matcher)
        probe = self._matcher.deep_copy()
        mask = np.zeros_like(self._eos_words)
        probe.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check(probe)
        if not mask.any():
            raise self._invalid("it allows no text at all")

    def begin(self) -> GrammarState:
        """The state of an output without tokens."""
        return GrammarState(self._matcher.deep_copy(), self._eos_words)

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise self._invalid(matcher.get_error())

    def _invalid(self, reason: str) -> InvalidGrammarError:
        return InvalidGrammarError(f"StructuredOutput.{self._kind}: cannot be compiled: {_shortened(reason)}")


class GrammarState:
    """Follows from the output alone, so whoever has lost count gives all of it again."""

    __slots__ = ("_eos_words", "_matcher", "_num_accepted", "_num_masked", "_spent_s")

    def __init__(self, matcher: LLMatcher, eos_words: MaskWords) -> None:
        self._matcher = matcher
        self._eos_words = eos_words
        self._num_accepted = self._num_masked = 0
        self._spent_s = 0.0

    def accept(self, token_ids: Sequence[int], start: int) -> None:
        """Take what is new of an output, which is token_ids[start:], without the token that ends it."""
        new = token_ids[start + self._num_accepted :]
        if new:
            begin_s = time.thread_time()
            self._num_accepted += len(new)
            self._matcher.consume_tokens(list(new))
            self._spent_s += time.thread_time() - begin_s

    @property
    def is_complete(self) -> bool:
        """Whether the output is one that the grammar allows, and nothing may follow it."""
        return self._matcher.is_stopped() and self.error is None

    @property
    def error(self) -> str | None:
        """Why there can be no further token."""
        if self._matcher.is_error():
            return _shortened(self._matcher.get_error())
        if self._spent_s > MAX_TOKEN_S * max(self._num_accepted - self._num_masked, 1):
            return f"it takes more than {MAX_TOKEN_S} s to find out what may follow"
        return None

    def mask(self, *, may_end: bool) -> MaskWords | None:
        """The tokens that may come next; None if there are none: the output is complete, or there is an `error`.

        may_end: an end-of-sequence token may be among them, where the output may end.
        """
        words = np.zeros_like(self._eos_words)
        begin_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._spent_s += time.thread_time() - begin_s
        going_on = words & ~self._eos_words
        if self.error is not None or not going_on.any():
            return None
        self._spent_s, self._num_masked = 0.0, self._num_accepted
        return words if may_end else going_on


def _source(spec: StructuredOutput) -> str:
    """The grammar as the library takes it."""
    from llguidance import LLMatcher

    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in spec.choice)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    if spec.grammar is not None:
        return LLMatcher.grammar_from_lark(to_lark(spec.grammar))
    pattern = "" if spec.disable_any_whitespace else spec.whitespace_pattern or WHITESPACE
    return LLMatcher.grammar_from_json_schema(
        str(spec.json or ANY_OBJECT),
        defaults={
            "whitespace_flexible": bool(pattern),
            "whitespace_pattern": pattern or None,
            "coerce_one_of": True,
        },
    )


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, verbose_errors=False)


def _words(token_ids: Sequence[int], vocab_size: int) -> MaskWords:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _shortened(reason: str) -> str:
    reason = reason.replace("<non-verbose/>", "").strip()
    return reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + "..."
