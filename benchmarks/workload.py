"""Fixed workloads of token ids, the same for every engine. Lengths follow a log-normal law, as chat traffic does."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
SEED = 20261130


@dataclass(frozen=True, slots=True)
class Item:
    """One request: prompt ids, and exactly how many tokens to generate (end-of-sequence ids are ignored)."""

    prompt: list[int]
    max_tokens: int


def mixed(ids: list[int], count: int = 64, seed: int = SEED) -> list[Item]:
    """`count` requests: prompts of 16 to 512 tokens cut from `ids` (repeated as needed), 16 to 256 output tokens."""
    rng = random.Random(seed)
    text = ids * (1 + 4096 // len(ids))
    items = []
    for _ in range(count):
        prompt = int(min(512, max(16, rng.lognormvariate(math.log(130), 0.9))))
        output = int(min(256, max(16, rng.lognormvariate(math.log(110), 0.7))))
        at = rng.randrange(len(text) - prompt)
        items.append(Item(text[at : at + prompt], output))
    return items
