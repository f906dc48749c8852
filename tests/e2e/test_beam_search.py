"""Beam search equals transformers' `generate(num_beams=...)`, on tiny models of every family and on a real one.

Both sides compute in float32 in different orders, so a prompt is compared only while the reference's choices are clear:
the log-probability of what it kept, of what it did not, and of neighbours in its result are more than TIE apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from e2e.engines import EngineMaker, assert_idle, random_prompt
from e2e.real_prompts import real_prompts
from e2e.test_parity_real_weights import load_in_transformers
from isthmus import LLM, BeamSearchParams, FinishReason, RequestOutput
from isthmus.checkpoints.open import open_checkpoint
from isthmus.testing.tiny_models import FAMILIES, tiny_model

BLOCK_SIZE = 8
LENGTHS = (5, 8, 17, 40)
"""Of the tiny models' prompts: less than a block, one block, around two and past the windows."""
STOP_IDS = tuple(range(25, 384, 7))
"""So many that sequences end at every step."""
TIE = 1e-4
REAL_TIE = 1e-3
REAL_MODEL = "smollm2-135m-instruct"
REAL_LENGTH = 24
NUM_REAL_PROMPTS = 8
NUM_REAL_TOKENS = 24


class Margins(LogitsProcessor):
    """Watches transformers' search. `smallest`: for each prompt, the least log-probability by which a continuation that
    lives on or may end was better than the best one that was given up.
    """

    def __init__(self, width: int, stop_ids: Sequence[int]) -> None:
        self._width, self._stop_ids = width, list(stop_ids)
        self._logprobs: dict[tuple[int, ...], float] = {}
        self.smallest: dict[int, float] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for prompt, rows in enumerate(torch.arange(len(input_ids)).split(self._width)):
            beams = {tuple(input_ids[row].tolist()): scores[row] for row in rows.tolist()}
            before = [self._logprobs.get(beam, 0.0) for beam in beams]
            after = torch.stack(list(beams.values())) + torch.tensor(before)[:, None]
            going_on = after.clone()
            going_on[:, self._stop_ids] = -torch.inf
            margin = min(self._margin(after), self._margin(going_on))
            self.smallest[prompt] = min(self.smallest.get(prompt, margin), margin)
            best = going_on.flatten().topk(2 * self._width)
            for logprob, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                beam = list(beams)[index // scores.shape[1]]
                self._logprobs[(*beam, index % scores.shape[1])] = logprob
        return scores

    def _margin(self, logprobs: torch.Tensor) -> float:
        best = logprobs.flatten().topk(self._width + 1).values
        return float(best[-2] - best[-1])


@dataclass(frozen=True)
class Found:
    """A prompt's sequences, the best first. is_clear: whether rounding could not have decided anything."""

    token_ids: list[list[int]]
    scores: list[float]
    is_clear: bool


@torch.inference_mode()
def transformers_search(
    model: Any, prompts: list[list[int]], params: BeamSearchParams, stop_ids: Sequence[int], tie: float
) -> list[Found]:
    """transformers' answer to prompts of one length."""
    width, margins = params.beam_width, Margins(params.beam_width, stop_ids)
    length = len(prompts[0])
    result = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), length, dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([margins]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = [up_to_stop(row, stop_ids, params.max_tokens) for row in result.sequences[:, length:].tolist()]
    scores: list[float] = result.sequences_scores.tolist()
    found = []
    for prompt in range(len(prompts)):
        part = slice(prompt * width, (prompt + 1) * width)
        gaps = [a - b for a, b in zip(scores[part], scores[part][1:], strict=False)]
        found.append(Found(outputs[part], scores[part], min(*gaps, margins.smallest[prompt]) > tie))
    return found


def up_to_stop(row: Sequence[int], stop_ids: Sequence[int], max_tokens: int | None) -> list[int]:
    """Without the padding."""
    end = next((index + 1 for index, token in enumerate(row) if token in stop_ids), max_tokens)
    return list(row[:end])


def sequences(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def scores(output: RequestOutput) -> list[float | None]:
    return [completion.score for completion in output.outputs]


def compare(outputs: Sequence[RequestOutput], expected: Sequence[Found], tolerance: float) -> int:
    """Assert that those that are clear are equal; returns how many that are."""
    for number, (output, found) in enumerate(zip(outputs, expected, strict=True)):
        if found.is_clear:
            assert sequences(output) == found.token_ids, f"prompt {number}"
            assert scores(output) == pytest.approx(found.scores, abs=tolerance), f"prompt {number}"
    return sum(found.is_clear for found in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_on_every_family(family: str, tmp_path: Path, make_llm: EngineMaker) -> None:
    path = tiny_model(family, tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    llm = make_llm(path, block_size=BLOCK_SIZE, num_blocks=200)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    stop_ids = (reference.config.eos_token_id, *STOP_IDS)
    num_compared = num_ended = num_cases = 0
    for width in (2, 3, 4):
        for penalty, early_stopping in ((0.0, "never"), (1.0, False), (1.0, True), (1.0, "never"), (-1.0, False)):
            params = BeamSearchParams(
                beam_width=width,
                max_tokens=14,
                length_penalty=penalty,
                early_stopping=early_stopping,
                stop_token_ids=STOP_IDS,
            )
            expected = [
                one for prompt in prompts for one in transformers_search(reference, [prompt], params, stop_ids, TIE)
            ]
            outputs = llm.beam_search(prompts, params)
            num_compared += compare(outputs, expected, tolerance=1e-3)
            num_cases += len(prompts)
            num_ended += sum(c.finish_reason is FinishReason.STOP for output in outputs for c in output.outputs)
    assert num_compared >= 0.9 * num_cases
    assert num_ended > num_cases


def test_equals_transformers_on_a_real_model() -> None:
    checkpoint = open_checkpoint(REAL_MODEL)
    cut = {tuple(prompt[-REAL_LENGTH:]): None for prompt in real_prompts(checkpoint.tokenizer()) if len(prompt) > 30}
    prompts = [list(prompt) for prompt in cut][:NUM_REAL_PROMPTS]
    reference = load_in_transformers(checkpoint)
    eos = checkpoint.config()["eos_token_id"]
    num_compared = 0
    with LLM(str(checkpoint.path), device="cpu", dtype="float32", max_model_len=128, num_blocks=256) as llm:
        for width in (2, 4):
            params = BeamSearchParams(beam_width=width, max_tokens=NUM_REAL_TOKENS)
            expected = transformers_search(reference, prompts, params, [eos], REAL_TIE)
            num_compared += compare(llm.beam_search(prompts, params), expected, tolerance=1e-4)
        assert_idle(llm)
    print(f"{num_compared} of {2 * len(prompts)} searches compared")
    assert num_compared >= 10
