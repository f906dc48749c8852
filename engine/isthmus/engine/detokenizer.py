"""Token ids to text, as they come: whole characters only, and nothing that may yet become a stop string.

The text is, by definition, that of decoding the output ids alone (not as a continuation of the prompt), whatever
the number of pieces in which they came. It equals `tokenizer.decode(output ids)` without clean-up of spaces, except
that byte-fallback tokens are read as UTF-8 with one U+FFFD per malformed part, where the library turns a whole run
of byte tokens into U+FFFD for one malformed byte. A character cut off by the end of the output is one U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from isthmus.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_MAX_BYTES_OF_CHARACTER = 4
_CROWDED_WINDOW = 3 * _MAX_BYTES_OF_CHARACTER


class TokenDecoder:
    """What detokenisation needs to know of a tokenizer, found once: shared by all requests, never changed.

    special_ids: ids that `skip_special_tokens` leaves out.
    high_bytes: byte-fallback id -> byte, for bytes that cannot be a character alone (>= 0x80).
    ascii_anchor: an id that decodes to one ASCII letter, if there are high bytes.
    num_ids: ids from here on are padding of the model's vocabulary and have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.special_ids = _special_ids(tokenizer)
        ids = tokenizer.get_vocab()
        self.num_ids = max(ids.values()) + 1
        byte_ids = {byte: ids[name] for byte in range(256) if (name := f"<0x{byte:02X}>") in ids}
        self.ascii_anchor = byte_ids.get(ord("A"), -1)
        has_byte_fallback = self.ascii_anchor >= 0 and self.decode([self.ascii_anchor]) == "A"
        self.high_bytes: Mapping[int, int] = (
            {token_id: byte for byte, token_id in byte_ids.items() if byte >= 0x80} if has_byte_fallback else {}
        )

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids` in one go, special tokens included."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


class TextStream:
    """Token ids in, text out, one token at a time. The pieces and the final `pending` text make the whole text.

    A piece is what the window of undecided tokens adds to the text of the tokens just before it (the context): some
    decoders treat the first token specially, so a token cannot be decoded alone. Where text is UTF-8 in pieces, a
    final U+FFFD may stand for a character whose rest is to come; it, and only it, is uncertain.
    """

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skipped = decoder.special_ids if skip_special_tokens else frozenset[int]()
        self._tokens_cut_characters = not decoder.high_bytes
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_bytes = False
        self._context: list[int] = []
        self._context_text = ""
        self._window: list[int] = []
        self._num_given = 0

    def push(self, token_id: int) -> str:
        """Text that this token makes certain; often its own, sometimes none."""
        if token_id in self._skipped or token_id >= self._decoder.num_ids:
            return ""
        byte = self._decoder.high_bytes.get(token_id)
        if byte is not None:
            self._in_bytes = True
            return self._bytes.decode(bytes((byte,)))
        return self._end_bytes() + self._push_ordinary(token_id)

    def pending(self) -> str:
        """The text of what is undecided, should nothing follow: that of a cut-off character is U+FFFD."""
        if self._in_bytes:
            undecoded, _ = self._bytes.getstate()
            return _REPLACEMENT if undecoded else ""
        return self._added_text()[self._num_given :] if self._window else ""

    def _push_ordinary(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._added_text()
        if self._tokens_cut_characters and text.endswith(_REPLACEMENT):
            piece = text[self._num_given : -1]
            self._num_given = len(text) - 1
            if len(self._window) >= _CROWDED_WINDOW:
                self._shorten_window()
            return piece
        piece = text[self._num_given :]
        if text:
            self._set_context(self._window)
        elif self._context:
            self._window = []
        return piece

    def _end_bytes(self) -> str:
        """Close a run of byte tokens before an ordinary token, which then is not the first of the text."""
        if not self._in_bytes:
            return ""
        self._in_bytes = False
        self._set_context([self._decoder.ascii_anchor])
        return self._bytes.decode(b"", True)

    def _added_text(self) -> str:
        text = self._decoder.decode(self._context + self._window)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decoder.decode(self._window)

    def _set_context(self, token_ids: list[int]) -> None:
        self._context, self._context_text = token_ids, self._decoder.decode(token_ids)
        self._window, self._num_given = [], 0

    def _shorten_window(self) -> None:
        """Keep the window short when malformed bytes follow each other without end.

        Where two parts decode to the same text as the whole, no character spans the cut, now or later. A cut-off
        character has at most three bytes, hence there is such a cut among the last few tokens.
        """
        text = self._decoder.decode(self._window)
        for cut in range(len(self._window) - 1, len(self._window) - _MAX_BYTES_OF_CHARACTER, -1):
            head, tail = self._window[:cut], self._window[cut:]
            tail_text = self._decoder.decode(tail)
            if self._decoder.decode(head) + tail_text == text:
                self._set_context(head)
                self._window, self._num_given = tail, len(tail_text) - 1
                return


class StopMatcher:
    """Finds the stop string that is complete first, and holds back only text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, include_in_text: bool) -> None:
        self._stops = tuple(stops)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._include = include_in_text
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The text that is free to go. After a match nothing more is."""
        if not self._stops:
            return piece
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        found = self._find(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        free = self._free_length(text)
        self._held = text[free:]
        return text[:free]

    def flush(self) -> str:
        """What was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first, the longest of those: independent of how the text was cut."""
        starts = [(text.find(stop), stop) for stop in self._stops]
        return min(
            ((start, stop) for start, stop in starts if start >= 0),
            key=lambda match: (match[0] + len(match[1]), match[0]),
            default=None,
        )

    def _free_length(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters and any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


class IncrementalDetokenizer:
    """The text of one request's output.

    Streamed or not, the text is the same, as it is always made here: `text` is the concatenation of the deltas.
    A stop string counts only if it begins after the text of the first `min_tokens` tokens.

    num_tokens: output tokens that the text stands for; those after the token that completed a stop string are not
    counted and should be dropped.
    """

    def __init__(self, decoder: TokenDecoder | None, params: SamplingParams) -> None:
        """decoder: None, or detokenize=False, makes every text empty."""
        self._stream: TextStream | None = None
        if decoder is not None and params.detokenize:
            self._stream = TextStream(decoder, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_strings, include_in_text=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_unmatchable = 0
        self._released: list[str] = []
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All released text."""
        return "".join(self._released)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output."""
        return self._matcher.matched

    def append(self, token_ids: Sequence[int], *, hide_last: bool = False) -> str:
        """Take the next output tokens and return the text they release; stops at the first stop string.

        hide_last: the last token is counted but not shown, for a stop token.
        """
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            is_hidden = hide_last and index == len(token_ids) - 1
            if self._stream is not None and not is_hidden:
                pieces.append(self._release(self._stream.push(token_id)))
                if self.num_tokens == self._min_tokens:
                    self._num_unmatchable = len(self._stream.pending())
        return self._emit("".join(pieces))

    def finish(self) -> str:
        """The rest of the text, as no more tokens come: what was held for a stop string and a cut-off character.

        A stop string of U+FFFD may still match here, so read `stopped_by` afterwards.
        """
        if self._stream is None or self.stopped_by is not None:
            return ""
        tail = self._release(self._stream.pending())
        return self._emit(tail + self._matcher.flush())

    def _release(self, piece: str) -> str:
        if self.num_tokens <= self._min_tokens:
            return piece
        free, matchable = piece[: self._num_unmatchable], piece[self._num_unmatchable :]
        self._num_unmatchable -= len(free)
        return free + self._matcher.push(matchable)

    def _emit(self, delta: str) -> str:
        if delta:
            self._released.append(delta)
        return delta
