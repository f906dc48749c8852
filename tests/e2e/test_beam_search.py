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

from e2e.engines import EngineMaker, assert_idle, finish, greedy, num_used_blocks, random_prompt, seeded
from e2e.real_prompts import real_prompts
from e2e.test_parity_real_weights import load_in_transformers
from isthmus import LLM, BeamSearchParams, FinishReason, RequestOutput
from isthmus.checkpoints.open import open_checkpoint
from isthmus.errors import InvalidParamsError, NeverFitsError
from isthmus.testing.tiny_models import FAMILIES, tiny_model

BLOCK_SIZE = 8
LENGTHS = (5, 8, 17, 40)
"""Of the tiny models' prompts: less than a block, one block, around two and past the windows."""
STOP_IDS = tuple(range(25, 384, 7))
"""So many that sequences end at every step."""
TIE = 1e-4
REAL_TIE = 1e-3
REAL_MODEL = "smollm2-135m-instruct"
REAL_LENGTH = 23
"""With the last so many tokens of these prompts every choice is clear; and the last block of 16 is not full."""
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
    assert num_compared >= 15


# The engine around it, on a tiny model.


SEARCH = BeamSearchParams(beam_width=4, max_tokens=24, stop_token_ids=STOP_IDS[:4], early_stopping="never")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine with room for everything, in which requests run one at a time. Its model is that of `tiny_llama`."""
    path = tiny_model("llama", tmp_path_factory.mktemp("beam") / "llama")
    with LLM(str(path), device="cpu", dtype="float32", block_size=BLOCK_SIZE, num_blocks=200) as llm:
        yield llm


def results(outputs: Sequence[RequestOutput]) -> list[list[tuple[list[int], FinishReason | None]]]:
    return [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in outputs]


def search_alone(alone: LLM, prompts: Sequence[list[int]], params: BeamSearchParams = SEARCH) -> list[RequestOutput]:
    return [output for prompt in prompts for output in alone.beam_search([prompt], params)]


@pytest.mark.parametrize(
    "settings",
    [
        {"preemption_mode": "recompute"},
        {"preemption_mode": "recompute", "enable_prefix_caching": False},
        {"preemption_mode": "swap", "swap_space_gib": 0.01},
        {"swap_space_gib": 0.01, "async_scheduling": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 5},
        {"swap_space_gib": 0.01, "scheduler__artificial_preemption_rate": 0.3},
    ],
    ids=str,
)
def test_a_tight_pool_changes_nothing(
    settings: dict[str, Any], alone: LLM, tiny_llama: Path, make_llm: EngineMaker
) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 12, 16, 23, 30)]
    llm = make_llm(tiny_llama, block_size=BLOCK_SIZE, num_blocks=28, **settings)
    assert results(llm.beam_search(prompts, SEARCH)) == results(search_alone(alone, prompts))
    stats = llm._core.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.num_swap_preemptions > 0) == ("swap_space_gib" in settings)


@pytest.mark.parametrize("asynchronous", [False, True], ids="async={}".format)
def test_other_requests_do_not_notice(asynchronous: bool, alone: LLM, tiny_llama: Path, make_llm: EngineMaker) -> None:
    """Greedy and random ones, with and without log-probabilities, run in the steps of two searches."""
    llm = make_llm(tiny_llama, block_size=BLOCK_SIZE, num_blocks=100, async_scheduling=asynchronous)
    prompts = {name: random_prompt(9 + 5 * index, seed=index) for index, name in enumerate("abcde")}
    params: dict[str, Any] = {
        "a": SEARCH,
        "b": greedy(20, logprobs=3),
        "c": seeded(20),
        "d": greedy(20),
        "e": BeamSearchParams(beam_width=2, max_tokens=20),
    }
    for name, prompt in prompts.items():
        llm._frontend.add_request(name, prompt, params[name])
    together = finish(llm, prompts)
    for name, prompt in prompts.items():
        is_search = isinstance(params[name], BeamSearchParams)
        (expected,) = (alone.beam_search if is_search else alone.generate)([prompt], params[name])
        assert results([together[name]]) == results([expected])
        for found, other in zip(together[name].outputs, expected.outputs, strict=True):
            assert found.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
            assert [list(entry) for entry in found.logprobs or ()] == [list(entry) for entry in other.logprobs or ()]


def test_the_log_probability_is_that_of_the_model(alone: LLM) -> None:
    """The sum over the sequence of what the model gives each token, with nothing divided or cut off."""
    reference = AutoModelForCausalLM.from_pretrained(alone.config.model.model, dtype=torch.float32).eval()
    prompt = random_prompt(10, seed=1)
    (output,) = alone.beam_search([prompt], SEARCH)
    for completion in output.outputs:
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])
        assert completion.cumulative_logprob == pytest.approx(float(logprobs.sum()), abs=1e-3)
        assert completion.score == pytest.approx(float(logprobs.mean()), abs=1e-3)


def test_beams_share_the_blocks_of_the_prompt(tiny_llama: Path, make_llm: EngineMaker) -> None:
    llm = make_llm(tiny_llama, block_size=BLOCK_SIZE, num_blocks=200)
    prompt = random_prompt(20 * BLOCK_SIZE + 3, seed=0)
    llm._frontend.add_request("a", prompt, BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True))
    most = 0
    while llm._frontend.has_unfinished:
        llm._frontend.step()
        most = max(most, num_used_blocks(llm))
    assert 20 + 4 <= most <= 20 + 4 * 2


@pytest.mark.parametrize("shown", [False, True])
def test_text_and_order(shown: bool, alone: LLM) -> None:
    params = BeamSearchParams(
        beam_width=3, max_tokens=12, stop_token_ids=STOP_IDS, include_stop_str_in_output=shown, length_penalty=0.0
    )
    outputs = alone.beam_search(["The river carries", random_prompt(6, seed=2)], params)
    assert [output.prompt for output in outputs] == ["The river carries", None]
    for output in outputs:
        assert output.finished
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        ordered = sorted(output.outputs, key=lambda completion: -(completion.score or 0.0))
        assert ordered == output.outputs
        for completion in output.outputs:
            stopped = completion.finish_reason is FinishReason.STOP
            assert stopped == (completion.token_ids[-1] in STOP_IDS)
            assert completion.stop_reason == (completion.token_ids[-1] if stopped else None)
            in_text = completion.token_ids[:-1] if stopped and not shown else completion.token_ids
            assert completion.text == alone.tokenizer.decode(in_text, skip_special_tokens=True)
            assert completion.score == completion.cumulative_logprob


def test_one_search_for_each_prompt(alone: LLM) -> None:
    prompts = [random_prompt(6, seed=1), random_prompt(7, seed=2)]
    params = [BeamSearchParams(beam_width=2, max_tokens=4), BeamSearchParams(beam_width=3, max_tokens=6)]
    outputs = alone.beam_search(prompts, params)
    assert [len(output.outputs) for output in outputs] == [2, 3]
    assert [output.prompt_token_ids for output in outputs] == prompts


@pytest.mark.parametrize("num_steps", range(6))
def test_a_search_that_is_given_up_leaves_nothing(num_steps: int, tiny_llama: Path, make_llm: EngineMaker) -> None:
    """By its own id, also when the request that it began with is no beam any more."""
    llm = make_llm(tiny_llama, block_size=BLOCK_SIZE, num_blocks=100)
    llm._frontend.add_request("a", random_prompt(12, seed=4), SEARCH)
    for _ in range(num_steps):
        llm._frontend.step()
    (output,) = llm._frontend.abort(["a"])
    assert output.finished
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert_idle(llm)


def test_a_search_of_the_rest_of_the_context(alone: LLM, tiny_llama: Path, make_llm: EngineMaker) -> None:
    """Without max_tokens, the beams may share the pool out among themselves."""
    llm = make_llm(tiny_llama, block_size=BLOCK_SIZE, num_blocks=13)
    params = BeamSearchParams(beam_width=2, ignore_eos=True, early_stopping="never")
    (output,) = llm.beam_search([random_prompt(27, seed=3)], params)
    # Of 13 blocks 3 hold the prompt, and 5 are each beam's own; the last token needs no place.
    assert [len(completion.token_ids) for completion in output.outputs] == [8 * BLOCK_SIZE + 1 - 27] * 2


def test_what_cannot_run_is_refused(tiny_llama: Path, make_llm: EngineMaker) -> None:
    llm = make_llm(tiny_llama, block_size=BLOCK_SIZE, num_blocks=12, max_num_seqs=4)
    prompt = random_prompt(3 * BLOCK_SIZE, seed=0)
    with pytest.raises(InvalidParamsError, match=r"beam_width=5: .* scheduler.max_num_seqs is 4"):
        llm.beam_search([prompt], BeamSearchParams(beam_width=5))
    # Three blocks that all share, and three for 25 tokens of each beam, the last of which is not stored.
    assert llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=3 * BLOCK_SIZE + 1))
    with pytest.raises(NeverFitsError, match=r"needs 15 blocks .* output tokens of each of 3 beams") as caught:
        llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=3 * BLOCK_SIZE + 2))
    assert (caught.value.needed_blocks, caught.value.available_blocks) == (15, 12)
    with pytest.raises(InvalidParamsError, match=r"BeamSearchParams.stop_token_ids: token id 9999 is outside"):
        llm.beam_search([prompt], BeamSearchParams(beam_width=2, stop_token_ids=[9999]))
