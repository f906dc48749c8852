"""What is asked: made up, or from a file."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.bench.serving.endpoint import BenchRequest
from isthmus.errors import InvalidPromptError

FIRST_ID = 20
"""Random ids begin here: many models have their special tokens below."""
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
"""Each is about one token, where token ids cannot be sent."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompt and answer, each drawn evenly from the length ± the length * range_ratio."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._one(rng, self.input_len), self._one(rng, self.output_len)

    def _one(self, rng: random.Random, length: int) -> int:
        spread = int(length * self.range_ratio)
        return max(rng.randint(length - spread, length + spread), 1)


def random_requests(
    lengths: Lengths, *, num_prefixes: int = 0, prefix_len: int = 0, vocab_size: int, as_text: bool, seed: int
) -> Iterator[BenchRequest]:
    """Without end: random prompts, the same for the same arguments.

    num_prefixes, prefix_len: each prompt begins with one of so many prefixes of so many tokens, in turn.  as_text:
    words in the place of ids below `vocab_size`.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> list[Any]:
        if as_text:
            return rng.choices(WORDS, k=count)
        return [rng.randrange(FIRST_ID, vocab_size) for _ in range(count)]

    prefixes = [tokens(prefix_len) for _ in range(num_prefixes)] or [[]]
    for prefix in itertools.cycle(prefixes):
        input_len, output_len = lengths.draw(rng)
        prompt = prefix + tokens(input_len)
        yield BenchRequest(" ".join(prompt) if as_text else prompt, output_len)


def requests_of_file(path: str, *, output_len: int | None, as_messages: bool) -> list[BenchRequest]:
    """Read a file with one JSON object a line: {"prompt": "..."}, {"messages": [...]} as OpenAI has them, or
    {"conversations": [{"from": "human", "value": "..."}, ...]} as ShareGPT has them; a list of such objects may also be
    the whole file. What comes after a conversation's first turn of the user is not sent.

    output_len: of every answer; None takes "output_len" or "max_tokens" of the object, or leaves it to the server.
    as_messages: for chat; otherwise a conversation becomes the text of its last message. Raises InvalidPromptError.
    """
    found = [_request(item, output_len, as_messages, where) for where, item in _objects(path)]
    if not found:
        raise InvalidPromptError(f"dataset {path!r} has no requests; give at least one")
    return found


def _objects(path: str) -> Iterator[tuple[str, Any]]:
    """(place, value) of each."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPromptError(f"dataset {path!r} cannot be read: {error}; give another file") from error
    try:
        if text.lstrip().startswith("["):
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(json.loads(text)))
            return
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield f"{path}:{number}", json.loads(line)
    except ValueError as error:
        raise InvalidPromptError(f"dataset {path!r} is not JSON: {error}; write one object a line") from error


def _request(item: Any, output_len: int | None, as_messages: bool, where: str) -> BenchRequest:
    try:
        messages = _messages(item)
        wanted = item.get("output_len", item.get("max_tokens")) if output_len is None else output_len
        return BenchRequest(messages if as_messages else str(messages[-1]["content"]), wanted)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        form = '{"prompt": "..."}, {"messages": [...]} or {"conversations": [{"from": "human", "value": "..."}, ...]}'
        raise InvalidPromptError(f"{where} has none of the forms {form}: {error!r}") from error


def _messages(item: Mapping[str, Any]) -> Messages:
    if "prompt" in item:
        return [{"role": "user", "content": item["prompt"]}]
    if "messages" in item:
        messages = list(item["messages"])
        while messages[-1]["role"] != "user":
            messages.pop()
        return messages
    asked = [turn["value"] for turn in item["conversations"] if turn["from"] in ("human", "user")]
    return [{"role": "user", "content": asked[0]}]
