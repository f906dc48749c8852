"""Incremental detokenisation and stop strings, on real tokenizers built here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from isthmus.engine.detokenizer import IncrementalDetokenizer, StopMatcher, TextStream, TokenDecoder
from isthmus.sampling_params import SamplingParams

_CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind",
    "naïve café 世界 👋 привет",
    "a\nb  c",
]
_SPECIAL = ["<s>", "</s>", "<unk>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_NAMES = ["byte_level", "sentencepiece", "gemma", "wordpiece"]
_REPLACEMENT = "\ufffd"


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def _byte_level() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _wrap(tokenizer)


def _byte_fallback(*, strips_leading_space: bool) -> PreTrainedTokenizerBase:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(_CORPUS[:1], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = {name: i for i, name in enumerate([*_SPECIAL, *_BYTES, *pieces, _REPLACEMENT])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_leading_space else steps)
    tokenizer.add_special_tokens(_SPECIAL)
    return _wrap(tokenizer)


def _wordpiece() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _wrap(tokenizer)


@functools.cache
def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    if name == "byte_level":
        return _byte_level()
    return _wordpiece() if name == "wordpiece" else _byte_fallback(strips_leading_space=name == "sentencepiece")


@functools.cache
def _decoder(name: str) -> TokenDecoder:
    return TokenDecoder(_tokenizer(name))


def _ids(name: str, *tokens: str) -> list[int]:
    return [_tokenizer(name).get_vocab()[token] for token in tokens]


def _byte_ids(name: str, data: bytes) -> list[int]:
    """One token a byte."""
    if name == "byte_level":
        return _ids(name, *(bytes_to_unicode()[byte] for byte in data))
    return _ids(name, *(_BYTES[byte] for byte in data))


def _stream(name: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[list[str], str]:
    """(pieces, pending text at the end)"""
    stream = TextStream(_decoder(name), skip_special_tokens=skip_special_tokens)
    return [stream.push(token_id) for token_id in token_ids], stream.pending()


def _by_definition(name: str, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The whole text in one go: the library's, except that byte-fallback tokens are bytes of UTF-8."""
    tokenizer = _tokenizer(name)
    if name in ("byte_level", "wordpiece"):
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
    data = b""
    for token in tokenizer.convert_ids_to_tokens(list(token_ids)):
        if token in _BYTES:
            data += bytes([_BYTES.index(token)])
        elif not (skip_special_tokens and token in _SPECIAL):
            data += token.replace("▁", " ").encode()
    text = data.decode("utf-8", errors="replace")
    return text.removeprefix(" ") if name == "sentencepiece" else text


def _finished(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int], *, at_once: bool = False) -> list[str]:
    """Deltas of all tokens, one at a time or at once, and of the end."""
    chunks = [list(token_ids)] if at_once else [[token_id] for token_id in token_ids]
    return [*(detokenizer.append(chunk) for chunk in chunks), detokenizer.finish()]


def _new(name: str = "byte_level", **params: Any) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(_decoder(name), SamplingParams(**params))


# ---- text


@st.composite
def _random_ids(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Ids of one tokenizer, often with many bytes, so that malformed UTF-8 of every kind occurs."""
    name = draw(st.sampled_from(_NAMES))
    size = len(_tokenizer(name))
    any_id = st.integers(0, size - 1)
    if name != "wordpiece":
        any_id = any_id | st.sampled_from(
            _byte_ids(name, bytes([0x20, 0x41, 0x80, 0xC3, 0xE4, 0xB8, 0x96, 0xF0, 0x9F]))
        )
    return name, draw(st.lists(any_id, max_size=40))


@settings(max_examples=400, deadline=None)
@given(_random_ids(), st.booleans())
def test_pieces_and_pending_make_the_one_shot_text(case: tuple[str, list[int]], skip: bool) -> None:
    name, token_ids = case
    pieces, pending = _stream(name, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) + pending == _by_definition(name, token_ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["byte_level", "sentencepiece", "gemma"]), st.text(max_size=30))
def test_well_formed_text_is_the_librarys_decode_and_never_shows_a_replacement(name: str, text: str) -> None:
    tokenizer = _tokenizer(name)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, pending = _stream(name, token_ids, skip_special_tokens=False)
    whole = str(tokenizer.decode(token_ids, skip_special_tokens=False))
    assert "".join(pieces) + pending == whole
    assert "".join(pieces).count(_REPLACEMENT) + pending.count(_REPLACEMENT) == whole.count(_REPLACEMENT)
    if _REPLACEMENT not in text:
        assert pending == ""
        assert _REPLACEMENT not in whole


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "gemma"])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("num_tokens", range(1, 11))
def test_a_cut_character_is_one_replacement_at_the_end_a14(name: str, at_once: bool, num_tokens: int) -> None:
    data = "a👋é世".encode()
    assert len(data) == 10
    token_ids = _byte_ids(name, data)[:num_tokens]
    complete = "a" if num_tokens < 5 else "a👋" if num_tokens < 7 else "a👋é" if num_tokens < 10 else "a👋é世"
    is_cut = len(complete.encode()) < num_tokens
    detokenizer = _new(name)
    deltas = _finished(detokenizer, token_ids, at_once=at_once)
    assert detokenizer.text == "".join(deltas) == complete + _REPLACEMENT * is_cut
    assert _REPLACEMENT not in "".join(deltas[:-1])


@pytest.mark.parametrize("name", ["byte_level", "gemma"])
def test_characters_come_with_the_token_that_completes_them(name: str) -> None:
    pieces, _ = _stream(name, _byte_ids(name, "é世!".encode()))
    assert pieces == ["", "é", "", "", "世", "!"]


def test_leading_space_of_sentencepiece_is_dropped_once_only() -> None:
    space_a = _ids("sentencepiece", "▁", "a")
    assert _stream("sentencepiece", space_a * 2) == (["", "a", " ", "a"], "")
    assert _stream("gemma", space_a * 2) == ([" ", "a", " ", "a"], "")
    after_bytes = [*_byte_ids("sentencepiece", "é".encode()), *space_a]
    assert _stream("sentencepiece", after_bytes) == (["", "é", " ", "a"], "")


def test_a_byte_newline_does_not_wait_for_its_run_to_end() -> None:
    token_ids = _byte_ids("sentencepiece", b"\n\xe4\xb8\x96\n")
    assert _stream("sentencepiece", token_ids) == (["\n", "", "", "世", "\n"], "")


@pytest.mark.parametrize("name", _NAMES)
def test_special_and_added_tokens(name: str) -> None:
    start, tool, end = _ids(name, "<s>", "<tool>", "</s>")
    letter = _ids(name, "a")[0]
    token_ids = [start, letter, tool, end, letter]
    for skip in (True, False):
        pieces, pending = _stream(name, token_ids, skip_special_tokens=skip)
        assert "".join(pieces) + pending == _tokenizer(name).decode(token_ids, skip_special_tokens=skip)
        assert ("<s>" in "".join(pieces)) is not skip
        assert "<tool>" in "".join(pieces)


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    padding = len(_tokenizer("byte_level"))
    letter = _ids("byte_level", "a")[0]
    assert _stream("byte_level", [padding, letter, padding + 999, letter]) == (["", "a", "", "a"], "")


@pytest.mark.parametrize("unit", [b"\x80", b"\xe4\xb8", b"\xf0\x9f\x91", b"\xf0"])
def test_endless_malformed_bytes_are_exact_in_a_short_window(unit: bytes) -> None:
    data = unit * 50
    stream = TextStream(_decoder("byte_level"), skip_special_tokens=True)
    pieces = [stream.push(token_id) for token_id in _byte_ids("byte_level", data)]
    assert "".join(pieces) + stream.pending() == data.decode(errors="replace")
    assert len(stream._window) < 16
    tail = [stream.push(token_id) for token_id in _byte_ids("byte_level", "世".encode())]
    assert tail[-1] == "世"


@pytest.mark.parametrize("decoder", [None, "byte_level"])
def test_without_detokenisation_tokens_are_counted_and_nothing_else(decoder: str | None) -> None:
    params = SamplingParams(detokenize=decoder is None)
    detokenizer = IncrementalDetokenizer(None if decoder is None else _decoder(decoder), params)
    assert _finished(detokenizer, [5, 6, 7]) == ["", "", "", ""]
    assert (detokenizer.text, detokenizer.num_tokens, detokenizer.stopped_by) == ("", 3, None)


def test_hidden_stop_token_is_counted_but_not_shown() -> None:
    a, b = _ids("byte_level", "a", "b")
    detokenizer = _new()
    assert detokenizer.append([a, b], hide_last=True) == "a"
    assert (detokenizer.finish(), detokenizer.text, detokenizer.num_tokens) == ("", "a", 2)


# ---- scripted texts and stop strings


class _Table:
    """A tokenizer whose token i is the i-th of the given texts, for scripted outputs."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self.added_tokens_decoder: dict[int, AddedToken] = {}
        self.all_special_ids: list[int] = []

    def get_vocab(self) -> dict[str, int]:
        return {f"token {i}": i for i in range(len(self._texts))}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(self._texts[token_id] for token_id in token_ids)


def _scripted(*texts: str, **params: Any) -> tuple[IncrementalDetokenizer, list[int]]:
    decoder = TokenDecoder(_Table(*texts))  # type: ignore[arg-type]
    return IncrementalDetokenizer(decoder, SamplingParams(**params)), list(range(len(texts)))


def test_tokens_without_text_do_not_fill_the_window() -> None:
    stream = TextStream(TokenDecoder(_Table("a", "")), skip_special_tokens=True)  # type: ignore[arg-type]
    assert "".join(stream.push(token_id) for token_id in [0, *[1] * 30, 0]) == "aa"
    stream.push(1)
    assert stream._window == []


_A12 = ("ABC", "DEF", "G", "HI", "J", "K")


@pytest.mark.parametrize("at_once", [False, True])
def test_the_beginning_of_a_stop_string_is_never_shown_a12(at_once: bool) -> None:
    detokenizer, token_ids = _scripted(*_A12, stop=["DEFGHIJ"])
    deltas = _finished(detokenizer, token_ids, at_once=at_once)
    assert deltas == (["ABC", ""] if at_once else ["ABC", "", "", "", "", "", ""])
    assert detokenizer.text == "ABC"
    assert detokenizer.stopped_by == "DEFGHIJ"
    assert detokenizer.num_tokens == 5


@pytest.mark.parametrize("at_once", [False, True])
def test_held_text_is_released_at_the_end_a12(at_once: bool) -> None:
    detokenizer, token_ids = _scripted(*_A12[:4], stop=["DEFGHIJ"])
    deltas = _finished(detokenizer, token_ids, at_once=at_once)
    assert deltas[0] == "ABC"
    assert deltas[-1] == "DEFGHI"
    assert detokenizer.text == "ABCDEFGHI"
    assert detokenizer.stopped_by is None


@pytest.mark.parametrize("at_once", [False, True])
def test_stop_string_in_output_a12(at_once: bool) -> None:
    detokenizer, token_ids = _scripted(*_A12, stop="DEFGHIJ", include_stop_str_in_output=True)
    _finished(detokenizer, token_ids, at_once=at_once)
    assert detokenizer.text == "ABCDEFGHIJ"


def test_text_that_cannot_become_a_stop_string_is_not_held() -> None:
    detokenizer, token_ids = _scripted("ABC", "DEFx", "D", "E", "y", stop=["DEFGHIJ"])
    assert _finished(detokenizer, token_ids) == ["ABC", "DEFx", "", "", "DEy", ""]


def test_a_match_inside_a_token_cuts_the_token() -> None:
    for include, text in ((False, "one "), (True, "one STOP")):
        detokenizer, token_ids = _scripted("one STOP two", " three", stop="STOP", include_stop_str_in_output=include)
        _finished(detokenizer, token_ids)
        assert (detokenizer.text, detokenizer.num_tokens) == (text, 1)


def test_stop_before_a_hidden_stop_token() -> None:
    detokenizer, token_ids = _scripted("a", "X", "</s>", stop="X")
    detokenizer.append(token_ids, hide_last=True)
    assert (detokenizer.text, detokenizer.stopped_by, detokenizer.num_tokens) == ("a", "X", 2)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stop_within_min_tokens_never_fires_a13(at_once: bool) -> None:
    texts = ["a", "\n", "b", "c", "d", "e", "\n", "f"]
    for min_tokens, kept, text in (
        (0, 2, "a"),
        (1, 2, "a"),
        (2, 7, "a\nbcde"),
        (6, 7, "a\nbcde"),
        (7, 8, "a\nbcde\nf"),
        (8, 8, "a\nbcde\nf"),
    ):
        detokenizer, token_ids = _scripted(*texts, stop="\n", min_tokens=min_tokens)
        _finished(detokenizer, token_ids, at_once=at_once)
        assert (detokenizer.num_tokens, detokenizer.text) == (kept, text)


def test_a_match_must_begin_after_min_tokens_a13() -> None:
    detokenizer, token_ids = _scripted("x", "A", "B", "A", "B", stop="AB", min_tokens=2)
    assert _finished(detokenizer, token_ids) == ["x", "A", "B", "", "", ""]
    assert detokenizer.stopped_by == "AB"


def test_a_character_begun_within_min_tokens_is_no_match_a13() -> None:
    token_ids = _byte_ids("byte_level", "é".encode() * 2)
    detokenizer = _new(stop="é", min_tokens=1)
    assert _finished(detokenizer, token_ids) == ["", "é", "", "", ""]
    assert (detokenizer.stopped_by, detokenizer.num_tokens) == ("é", 4)


def test_the_match_that_is_complete_first_wins_however_the_text_arrives() -> None:
    for pieces in (["abcdef"], list("abcdef"), ["abc", "def"]):
        matcher = StopMatcher(["abcdef", "cd", "bcd"], include_in_text=False)
        assert "".join(map(matcher.push, pieces)) == "a"
        assert matcher.matched == "bcd"


_AB = st.text(alphabet="ab", max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(_AB, max_size=6),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_matching_equals_a_search_at_each_character(pieces: list[str], stops: list[str], include: bool) -> None:
    whole = "".join(pieces)
    expected, matched = whole, None
    for end in range(1, len(whole) + 1):
        hits = [stop for stop in stops if whole[:end].endswith(stop)]
        if hits:
            matched = max(hits, key=len)
            expected = whole[:end] if include else whole[: end - len(matched)]
            break
    matcher = StopMatcher(stops, include_in_text=include)
    released = ""
    for piece in pieces:
        released += matcher.push(piece)
        assert expected.startswith(released)
        if matcher.matched is None:
            assert len(released + matcher._held) <= len(whole)
            assert any(stop.startswith(matcher._held) for stop in stops)
    released += matcher.flush()
    assert (released, matcher.matched) == (expected, matched)


@settings(max_examples=200, deadline=None)
@given(_random_ids(), st.integers(0, 5), st.data())
def test_chunks_do_not_change_the_text_or_the_stop(case: tuple[str, list[int]], min_tokens: int, data: Any) -> None:
    name, token_ids = case
    text = _by_definition(name, token_ids, skip_special_tokens=True)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 3))] or "x"
    one, many = (_new(name, stop=stop, min_tokens=min_tokens) for _ in range(2))
    deltas = _finished(one, token_ids)
    _finished(many, token_ids, at_once=True)
    assert "".join(deltas) == one.text == many.text
    assert (one.stopped_by, one.num_tokens) == (many.stopped_by, many.num_tokens)
    if one.stopped_by is None:
        assert one.text == text
    else:
        assert text.startswith(one.text + stop)
