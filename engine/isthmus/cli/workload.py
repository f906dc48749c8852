"""What a benchmark asks of the engine: prompts of token ids, and how many tokens each is answered with."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from isthmus.cli.text_files import read_text
from isthmus.errors import InvalidPromptError


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: its prompt, and exactly how many tokens to generate."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths in tokens, `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Span:
        """`128` or `32:256`. Raises ValueError for anything else."""
        ends = text.split(":")
        if len(ends) > 2 or not all(end.isdecimal() for end in ends) or not 1 <= int(ends[0]) <= int(ends[-1]):
            raise ValueError(f"{text!r} is neither a length >= 1 nor a range LOW:HIGH of such")
        return cls(int(ends[0]), int(ends[-1]))

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def random_workload(num_requests: int, inputs: Span, outputs: Span, *, vocab_size: int, seed: int) -> list[WorkItem]:
    """Requests of random ids, with lengths spread evenly over the spans; the same for the same arguments."""
    rng = random.Random(seed)
    return [
        WorkItem([rng.randrange(vocab_size) for _ in range(inputs.draw(rng))], outputs.draw(rng))
        for _ in range(num_requests)
    ]


def load_workload(path: str) -> list[WorkItem]:
    """Read `{"requests": [{"prompt": [ids], "max_tokens": n}, ...]}`. Raises InvalidPromptError."""
    try:
        items = [_item(request) for request in json.loads(read_text(path))["requests"]]
    except (ValueError, TypeError, KeyError) as error:
        form = '{"requests": [{"prompt": [ids], "max_tokens": n}, ...]}'
        raise InvalidPromptError(f"workload {path!r} is not of the form {form}: {error!r}") from error
    if not items:
        raise InvalidPromptError(f"workload {path!r} has no requests; give at least one")
    return items


def _item(request: dict[str, Any]) -> WorkItem:
    prompt, max_tokens = request["prompt"], request["max_tokens"]
    if not isinstance(prompt, list) or not isinstance(max_tokens, int):
        raise TypeError(f"prompt is a {type(prompt).__name__}, max_tokens a {type(max_tokens).__name__}")
    return WorkItem(prompt, max_tokens)
