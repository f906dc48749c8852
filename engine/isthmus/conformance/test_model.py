"""Area "model": whole tiny models give the greedy tokens of transformers in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

from isthmus import LLM
from isthmus.conformance.continuations import NEAR_TIE, Continuation, Difference
from isthmus.conformance.engines import attention_names, greedy, running, token_ids
from isthmus.conformance.plugin import is_thin, target_of
from isthmus.conformance.target import Target
from isthmus.testing.tiny_models import PROMPTS, greedy_logits, tiny_model, tiny_tokenizer

FAMILIES: Mapping[str, float] = MappingProxyType({"llama": 0.3, "qwen3": 0.5, "gemma3": 0.4, "mistral": 0.3})
"""Plain; norms on queries and keys; window layers, soft norms and scaled embeddings; windows alone.

family -> init_std. Larger weights, as the other tests have them, make attention without norms on queries and keys so
sharp that bfloat16 overturns leads of half a standard deviation of the logits.
"""
LONG_PROMPT = " ".join(PROMPTS)
"""Several blocks, and several windows."""
NUM_TOKENS = 24
MIN_AGREEMENT = 0.85
"""Share of the positions at which even the least exact dtype must choose the reference's token; a CPU's worst: 0.94."""
MAX_LISTED = 8
"""Differences in a message."""
NUM_BLOCKS = 64
MAX_NUM_SEQS = 8

Model = tuple[Path, tuple[Continuation, ...]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every family in every dtype; where that takes too long, the first family in all, the others in the preferred."""
    if "family" in metafunc.fixturenames:
        dtypes = target_of(metafunc.config).info.dtypes
        models = [
            (family, dtype)
            for dtype in dtypes
            for family in FAMILIES
            if not is_thin(metafunc.config) or dtype == dtypes[0] or family == next(iter(FAMILIES))
        ]
        metafunc.parametrize(("family", "dtype"), models, ids=map("-".join, models))


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """family -> its checkpoint, and the reference's answer to each prompt. Made once."""

    @cache
    def make(family: str) -> Model:
        path = tiny_model(family, tmp_path_factory.mktemp(family), init_std=FAMILIES[family])
        return path, tuple(reference(path, prompt) for prompt in (*PROMPTS, LONG_PROMPT))

    return make


def reference(path: Path, prompt: str) -> Continuation:
    """Greedy, with the logits of the whole vocabulary at each position."""
    prompt_token_ids = tiny_tokenizer()(prompt).input_ids
    chosen, logits = greedy_logits(path, prompt_token_ids, NUM_TOKENS)
    scores = tuple(dict(enumerate(row)) for row in logits.tolist())
    return Continuation(tuple(prompt_token_ids), tuple(chosen), scores, prompt)


def differences(llm: LLM, references: Sequence[Continuation]) -> list[Difference]:
    """Have every token of every reference chosen, all prompts in one batch. Where another token is chosen, go on
    behind the reference's, so that one difference does not hide what follows.
    """
    found: list[Difference] = []
    pending = [(expected, 0) for expected in references]
    while pending:
        prompts = [expected.prompt_until(start) for expected, start in pending]
        outputs = llm.generate(prompts, [greedy(NUM_TOKENS - start) for _, start in pending], progress=False)
        firsts = [
            expected.first_difference(token_ids(output), start=start)
            for (expected, start), output in zip(pending, outputs, strict=True)
        ]
        new = [first for first in firsts if first is not None]
        pending = [(first.expected, first.position + 1) for first in new if first.position + 1 < NUM_TOKENS]
        found += new
    return found


def test_greedy_tokens_are_those_of_the_reference(
    target: Target,
    model_of: Callable[[str], Model],
    family: str,
    dtype: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Equal, but for near-ties: tokens whose logits the reference itself has almost equal."""
    path, references = model_of(family)
    with running(target, path, dtype=dtype, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS) as llm:
        attention = attention_names(llm)
        found = differences(llm, references)
    total = NUM_TOKENS * len(references)
    widest = max((difference.lead for difference in found), default=0.0)
    record_property(
        f"{family} {dtype}", f"attention {attention}; near-ties {len(found)} of {total}, widest {widest:.2g}"
    )
    problem = too_different(found, total, NEAR_TIE[dtype])
    if problem is not None:
        raise AssertionError(f"{family} in {dtype}: {problem}:{listed(found)}")


def listed(found: Sequence[Difference]) -> str:
    """A line each, those that rounding explains least."""
    worst = sorted(found, key=lambda difference: -difference.lead)[:MAX_LISTED]
    more = f"\n  and {len(found) - len(worst)} more" if len(worst) < len(found) else ""
    return "".join(f"\n  {difference}" for difference in worst) + more


def too_different(found: Sequence[Difference], total: int, near_tie: float) -> str | None:
    """What is wrong with these differences, of `total` tokens."""
    wrong = sum(difference.lead >= near_tie for difference in found)
    if wrong:
        return f"{wrong} of {total} tokens are wrong, by {near_tie:g} or more"
    agreed = total - len(found)
    if agreed < MIN_AGREEMENT * total:
        return f"only {agreed} of {total} tokens agree, {MIN_AGREEMENT:.0%} must"
    return None
