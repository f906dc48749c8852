"""Text over HTTP, in both routes, streamed and not: stop strings (cases A12, A13) and cut characters (case A14)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.testing.scripted import scripted_model, scripted_plugins
from isthmus.testing.tiny_models import tiny_tokenizer
from server.http_server import COMPLETIONS, HttpServer, choices_of, serving, text_of

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 32,
    "plugins": scripted_plugins,
}
PIECES = ["ABC", "DEF", "G", "HI", "J", "K"]
LETTERS = "aXbXcXdXeXfXgXhXiXjX"
CHARACTERS = "a👋é中"


def scripted(folder: Path, pieces: Sequence[str]) -> Path:
    """A model that answers the prompt [0] with these pieces, of which the ASCII ones are one token each."""
    tokenizer = tiny_tokenizer()
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([piece for piece in dict.fromkeys(pieces) if piece.isascii() and piece not in known])
    script = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    return scripted_model(folder, tokenizer, [token_id for ids in script for token_id in ids])


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with serving(scripted(tmp_path_factory.mktemp("scripted") / "pieces", PIECES), **ENGINE) as found:
        yield found


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with serving(scripted(tmp_path_factory.mktemp("scripted") / "letters", LETTERS), **ENGINE) as found:
        yield found


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with serving(scripted(tmp_path_factory.mktemp("scripted") / "characters", CHARACTERS), **ENGINE) as found:
        yield found


def written(server: HttpServer, max_tokens: int, **body: Any) -> tuple[str, str, int]:
    """(text, finish reason, number of tokens), the same streamed and not."""
    body = {"prompt": [0], "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **body}
    answer = server.ask(COMPLETIONS, **body)
    [choice] = answer["choices"]
    events = server.stream(COMPLETIONS, stream_options={"include_usage": True}, **body)
    assert text_of(events) == choice["text"]
    last = choices_of(events)[-1]
    assert (last["finish_reason"], last["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    assert events[-1]["usage"] == {**answer["usage"], "prompt_tokens_details": {"cached_tokens": 0}}
    return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("max_tokens", "stop", "expected"),
    [
        (6, ["DEFGHIJ"], ("ABC", "stop", 5)),
        (4, ["DEFGHIJ"], ("ABCDEFGHI", "length", 4)),
        (6, "EF", ("ABCD", "stop", 2)),
        (6, ["nothing", "HIJ"], ("ABCDEFG", "stop", 5)),
        (6, "", ("ABCDEFGHIJK", "length", 6)),
        (6, [], ("ABCDEFGHIJK", "length", 6)),
    ],
)
def test_stop_strings(max_tokens: int, stop: Any, expected: tuple[str, str, int], pieces: HttpServer) -> None:
    """Case A12."""
    assert written(pieces, max_tokens, stop=stop) == expected


def test_a_stop_string_that_is_kept(pieces: HttpServer) -> None:
    """Case A12."""
    found = written(pieces, 6, stop=["DEFGHIJ"], include_stop_str_in_output=True)
    assert found == ("ABCDEFGHIJ", "stop", 5)


def test_nothing_of_a_stop_string_is_sent_early(pieces: HttpServer) -> None:
    """Case A12: with an output a token, every beginning of what was sent is right."""
    body = {"prompt": [0], "temperature": 0, "max_tokens": 6, "stop": ["DEFGHIJ"], "return_token_ids": True}
    sent = [choice["text"] for choice in choices_of(pieces.stream(COMPLETIONS, **body))]
    assert "".join(sent) == "ABC"
    assert all("ABC".startswith("".join(sent[:count])) for count in range(len(sent)))


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 20])
def test_stop_strings_wait_for_min_tokens(min_tokens: int, letters: HttpServer) -> None:
    """Case A13."""
    end = next((at for at in range(1, 20, 2) if at >= min_tokens), 20)
    expected = (LETTERS[:end], "stop" if end < 20 else "length", min(end + 1, 20))
    assert written(letters, 20, stop="X", min_tokens=min_tokens) == expected


def test_every_cut_of_a_character(characters: HttpServer) -> None:
    """Case A14."""
    encoded = CHARACTERS.encode()
    for count in range(1, len(encoded) + 1):
        whole = encoded[:count].decode(errors="ignore")
        is_cut = len(whole.encode()) < count
        assert written(characters, count) == (whole + "\ufffd" * is_cut, "length", count)
