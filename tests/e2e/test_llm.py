"""LLM, the offline front door: order, faults, Ctrl-C, streams, chat, limits, and that nothing is left behind."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from e2e.engines import (
    EngineMaker,
    Solo,
    assert_idle,
    greedy,
    num_used_blocks,
    random_prompt,
    run,
    runner,
    seeded,
    submit,
    token_ids,
)
from isthmus import LLM, EngineConfig, SamplingParams
from isthmus.config import from_kwargs
from isthmus.errors import EngineDeadError, InvalidParamsError, InvalidPromptError, RequestError
from isthmus.scheduler.output import ModelRunnerOutput, SchedulerOutput
from isthmus.testing.tiny_models import PROMPTS

LENGTHS = (5, 40, 1, 17, 33, 16, 8, 64)
MANY = [random_prompt(length, seed=length) for length in LENGTHS]
Step = Callable[[SchedulerOutput], ModelRunnerOutput]


def solos(solo: Solo, model: Path, prompts: Sequence[Any], params: SamplingParams) -> list[list[int]]:
    return [solo(model, prompt, params) for prompt in prompts]


def break_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, number: int, fault: Callable[[], None], *, at: str = "before"
) -> None:
    """Let `fault` happen in the `number`-th step from now, before or after the runner's work."""
    execute: Step = runner(llm).execute_model
    calls = iter(range(1, 10**6))

    def step(output: SchedulerOutput) -> ModelRunnerOutput:
        is_it = next(calls) == number
        if is_it and at == "before":
            fault()
        result = execute(output)
        if is_it and at == "after":
            fault()
        return result

    monkeypatch.setattr(runner(llm), "execute_model", step)


def explode() -> None:
    raise ZeroDivisionError("the device is on fire")


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def press_ctrl_c_twice() -> None:
    press_ctrl_c()
    press_ctrl_c()


def test_results_come_in_input_order(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """Short requests end first; their outputs still stand where their prompts do."""
    llm = make_llm(tiny_llama, max_num_seqs=3)
    params = [greedy(max_tokens) for max_tokens in (12, 1, 7, 3, 9, 2, 5, 4)]
    outputs = llm.generate(MANY, params)
    assert [output.prompt_token_ids for output in outputs] == MANY
    expected = [solo(tiny_llama, prompt, one) for prompt, one in zip(MANY, params, strict=True)]
    assert [token_ids(output) for output in outputs] == expected


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("budget", [8, 2048])
@pytest.mark.parametrize("is_cached", [True, False], ids=["cache", "no_cache"])
def test_tokens_depend_on_the_request_alone(
    block_size: int, budget: int, is_cached: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """Chunks, company, preemption and cached prefixes change nothing, greedy or seeded."""
    llm = make_llm(
        tiny_llama,
        block_size=block_size,
        num_blocks=120 // block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        enable_prefix_caching=is_cached,
    )
    for params in (greedy(20), seeded(20)):
        for _ in range(2):
            outputs = llm.generate(MANY, params)
            assert [token_ids(output) for output in outputs] == solos(solo, tiny_llama, MANY, params)
    assert llm._core.scheduler.stats.num_preemptions > 0


def test_text_token_ids_and_mappings(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    text = PROMPTS[0]
    ids = llm.tokenizer.encode(text)
    forms: list[Any] = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}]
    forms.append({"prompt": "shown", "prompt_token_ids": ids})
    outputs = llm.generate(forms, greedy(8))
    assert [output.prompt for output in outputs] == [text, None, None, text, None, "shown"]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert all(token_ids(output) == token_ids(outputs[0]) for output in outputs)
    assert outputs[0].outputs[0].text == llm.tokenizer.decode(token_ids(outputs[0]))


def test_one_prompt_needs_no_list(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    for prompt in (PROMPTS[0], MANY[0], {"prompt": PROMPTS[0]}):
        assert len(llm.generate(prompt, greedy(2))) == 1
    assert llm.generate([], greedy(2)) == []


def test_config_in_place_of_a_name(tiny_llama: Path) -> None:
    config = from_kwargs(str(tiny_llama), device="cpu", dtype="float32", num_blocks=8)
    assert isinstance(config, EngineConfig)
    with LLM(config) as llm:
        assert len(token_ids(llm.generate([MANY[0]], greedy(3))[0])) == 3
    with pytest.raises(EngineDeadError, match="the executor has no worker"):
        llm.generate([MANY[0]], greedy(3))


WRONG_PROMPTS: tuple[tuple[Any, str], ...] = (
    ([], "the prompt has no tokens; give at least one"),
    (None, "prompt of type NoneType; give a string or a list of token ids"),
    (3.5, "prompt of type float; give a string or a list of token ids"),
    (["a", "b"], "prompt token 'a' is a str; token ids are integers"),
    ([1, True], "prompt token True is a bool; token ids are integers"),
    ({"text": "a"}, "prompt {'text': 'a'} has neither 'prompt' nor 'prompt_token_ids'; give one of them"),
    (
        [7] * 512,
        "the prompt has 512 tokens, the model takes 512 with at least one for the output; shorten the prompt or "
        "raise model.max_model_len",
    ),
)


@pytest.mark.parametrize(("prompt", "message"), WRONG_PROMPTS, ids=[text[:30] for _, text in WRONG_PROMPTS])
def test_wrong_prompt_in_a_list(prompt: Any, message: str, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """Nothing of the call is generated, and the next call does not notice."""
    llm = make_llm(tiny_llama)
    with pytest.raises(InvalidPromptError) as error:
        llm.generate([MANY[0], prompt, MANY[1]], greedy(4))
    assert str(error.value) == message
    assert error.value.__notes__ == ["in prompt 1 of 3"]
    assert llm._core.scheduler.stats.num_steps == 0
    assert_idle(llm)
    outputs = llm.generate(MANY, greedy(4))
    assert [token_ids(output) for output in outputs] == solos(solo, tiny_llama, MANY, greedy(4))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_params_as_prompts(count: int, make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    message = f"2 prompts but {count} sampling_params; give one for all, or one for each"
    with pytest.raises(RequestError) as error:
        llm.generate(MANY[:2], [greedy(4)] * count)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_number_of_logprobs_is_limited(name: str, make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    with pytest.raises(
        InvalidParamsError, match=rf"^SamplingParams\.{name}=21: at most 20; ask for fewer\nin prompt 0 of 1$"
    ):
        llm.generate([MANY[0]], greedy(4, **{name: 21}))


@pytest.mark.parametrize("at", ["before", "after"])
@pytest.mark.parametrize("number", [1, 3])
def test_failed_step(
    number: int, at: str, make_llm: EngineMaker, tiny_llama: Path, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends with the cause; later calls work, and trust no block that the lost step was to fill."""
    llm = make_llm(tiny_llama, max_num_seqs=4)
    with monkeypatch.context() as patch:
        break_step(llm, patch, number, explode, at=at)
        with pytest.raises(EngineDeadError) as error:
            llm.generate(MANY, greedy(8))
    lost = len(MANY)
    assert str(error.value) == (
        f"a step failed and took {lost} requests with it: ZeroDivisionError: the device is on fire"
    )
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert_idle(llm)
    outputs = llm.generate(MANY, greedy(8))
    assert [token_ids(output) for output in outputs] == solos(solo, tiny_llama, MANY, greedy(8))
    assert not any(output.num_cached_tokens for output in outputs)


def test_many_failed_steps_use_up_nothing(
    make_llm: EngineMaker, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a request ended in the step before: the worker has not heard of that yet when the step fails."""
    llm = make_llm(tiny_llama, max_num_seqs=2)
    for _ in range(5):
        with monkeypatch.context() as patch:
            break_step(llm, patch, 2, explode)
            with pytest.raises(EngineDeadError):
                llm.generate(MANY[:2], [greedy(1), greedy(8)])
    assert_idle(llm)


def test_stream_whose_step_failed_in_another_call(
    make_llm: EngineMaker, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(tiny_llama)
    stream = llm.stream(MANY[0], greedy(8))
    next(stream)
    with monkeypatch.context() as patch:
        break_step(llm, patch, 2, explode)
        with pytest.raises(EngineDeadError):
            llm.generate(MANY[1:3], greedy(8))
    assert len(token_ids(next(stream))) == 2  # of the step that went well
    with pytest.raises(EngineDeadError) as error:
        next(stream)
    assert str(error.value) == "the request was lost when a step failed in another call; send it again"


@pytest.mark.parametrize("press", [press_ctrl_c, press_ctrl_c_twice], ids=["once", "twice"])
@pytest.mark.parametrize("at", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 8])
def test_ctrl_c_in_generate(
    number: int,
    at: str,
    press: Callable[[], None],
    make_llm: EngineMaker,
    tiny_llama: Path,
    solo: Solo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of a step, when requests wait, run and have finished."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=32, max_num_seqs=4)
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        break_step(llm, patch, number, press, at=at)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(MANY, [greedy(1), *[greedy(8)] * 7])
    assert signal.getsignal(signal.SIGINT) is handler
    assert_idle(llm)
    outputs = llm.generate(MANY, greedy(8))
    assert [token_ids(output) for output in outputs] == solos(solo, tiny_llama, MANY, greedy(8))


@pytest.mark.parametrize("press", [press_ctrl_c, press_ctrl_c_twice], ids=["once", "twice"])
def test_ctrl_c_in_a_stream(
    press: Callable[[], None], make_llm: EngineMaker, tiny_llama: Path, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's cache entries are whole or forgotten: the same prompt, sent again, is right."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=32)
    prompt = random_prompt(100, seed=3)
    with monkeypatch.context() as patch:
        break_step(llm, patch, 2, press)
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream(prompt, greedy(8)))
    assert_idle(llm)
    assert token_ids(run(llm, prompt, greedy(8), streamed=True)) == solo(tiny_llama, prompt, greedy(8))


def test_ctrl_c_in_generate_leaves_a_stream_alive(
    make_llm: EngineMaker, tiny_llama: Path, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(tiny_llama)
    stream = llm.stream(MANY[1], greedy(12))
    next(stream)
    with monkeypatch.context() as patch:
        break_step(llm, patch, 3, press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(MANY, greedy(12))
    *_, last = stream
    assert token_ids(last) == solo(tiny_llama, MANY[1], greedy(12))


@pytest.mark.parametrize("params", [greedy(10), seeded(10)], ids=["greedy", "seeded"])
def test_interleaved_streams(params: SamplingParams, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """Read in turns, at different speeds; a generate() call in between takes nothing from them."""
    llm = make_llm(tiny_llama)
    streams = [llm.stream(prompt, params) for prompt in MANY]
    last: dict[int, list[int]] = {}
    waiting = list(range(len(streams)))
    turn = 0
    while waiting:
        turn += 1
        for index in list(waiting):
            if turn % (index + 1):
                continue
            output = next(streams[index], None)
            if output is None:
                waiting.remove(index)
            else:
                last[index] = token_ids(output)
        if turn == 4:
            [between] = llm.generate([MANY[3]], params)
            assert token_ids(between) == solo(tiny_llama, MANY[3], params)
    assert [last[index] for index in range(len(MANY))] == solos(solo, tiny_llama, MANY, params)


def test_stream_gives_each_token_once(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    outputs = list(llm.stream(MANY[0], greedy(6, logprobs=1)))
    assert [len(token_ids(output)) for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert [len(output.outputs[0].logprobs or []) for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert outputs[0].metrics is not None
    assert outputs[0].metrics.time_to_first_token_s is not None


def test_stop_string_streamed(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    whole = run(llm, PROMPTS[0], greedy(16), streamed=False).outputs[0].text
    stop = next(whole[at : at + 3] for at in range(4, len(whole) - 3) if "\ufffd" not in whole[at : at + 3])
    output = run(llm, PROMPTS[0], greedy(16, stop=[stop]), streamed=True).outputs[0]
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("num_read", [1, 3])
def test_closed_stream_frees_its_blocks(num_read: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    llm = make_llm(tiny_llama)
    other = llm.stream(MANY[0], greedy(12))
    next(other)
    used = num_used_blocks(llm)
    stream = llm.stream(random_prompt(100, seed=5), greedy(50))
    for _ in range(num_read):
        next(stream)
    assert num_used_blocks(llm) == used + 7
    stream.close()  # type: ignore[attr-defined]
    assert num_used_blocks(llm) == used
    *_, last = other
    assert token_ids(last) == solo(tiny_llama, MANY[0], greedy(12))


def test_stream_that_is_never_read_costs_nothing(make_llm: EngineMaker, tiny_llama: Path) -> None:
    """But its prompt is checked at once."""
    llm = make_llm(tiny_llama)
    llm.stream(MANY[0], greedy(12))
    assert_idle(llm)
    with pytest.raises(InvalidPromptError):
        llm.stream([], greedy(12))


def test_loop_left_early(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    for output in llm.stream(MANY[0], greedy(12)):
        if len(token_ids(output)) == 2:
            break
    del output
    assert_idle(llm)


HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
RENDERED = "<s>system: Be brief.</s>\nuser: Hello</s>\nassistant: "


def test_chat(make_llm: EngineMaker, tiny_llama: Path) -> None:
    """The template brings its own beginning of sequence; the tokenizer must not add a second one."""
    llm = make_llm(tiny_llama)
    [output] = llm.chat(HELLO, greedy(6))
    assert output.prompt == RENDERED
    assert output.prompt_token_ids == llm.tokenizer.encode(RENDERED, add_special_tokens=False)
    assert output.prompt_token_ids.count(llm.tokenizer.bos_token_id) == 1
    *_, streamed = llm.stream_chat(HELLO, greedy(6))
    assert token_ids(streamed) == token_ids(output)


def test_chat_with_many_conversations_and_other_templates(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    other = [{"role": "user", "content": "Bye"}]
    outputs = llm.chat([HELLO, other], greedy(4))
    assert [output.prompt for output in outputs] == [RENDERED, "<s>user: Bye</s>\nassistant: "]
    [plain] = llm.chat(HELLO, greedy(4), add_generation_prompt=False)
    assert plain.prompt == RENDERED.removesuffix("assistant: ")
    template = "{% for m in messages %}[{{ m['content'] }}{{ mark }}]{% endfor %}"
    [given] = llm.chat(HELLO, greedy(4), chat_template=template, chat_template_kwargs={"mark": "!"})
    assert given.prompt == "[Be brief.!][Hello!]"


def test_chat_without_a_template(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    llm.tokenizer.chat_template = None
    with pytest.raises(InvalidPromptError, match=r"has no chat template; use generate\(\), or give chat_template$"):
        llm.chat(HELLO, greedy(4))


@pytest.fixture(scope="module")
def hf_model(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "params", [greedy(10, logprobs=3, prompt_logprobs=2), seeded(10, logprobs=3, prompt_logprobs=2)]
)
def test_logprobs(
    params: SamplingParams, streamed: bool, make_llm: EngineMaker, tiny_llama: Path, hf_model: Any
) -> None:
    """Those of the model as it is, by transformers' computation; temperature does not enter."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=32)
    output = run(llm, MANY[1], params, streamed=streamed)
    completion = output.outputs[0]
    whole = [*output.prompt_token_ids, *completion.token_ids]
    with torch.inference_mode():
        expected = hf_model(torch.tensor([whole])).logits[0].log_softmax(-1)
    entries = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
    assert len(entries) == len(whole) - 1
    for position, entry in enumerate(entries):
        assert entry is not None
        count = 2 if position + 1 < len(output.prompt_token_ids) else 3
        chosen = whole[position + 1]
        assert list(entry)[:count] == expected[position].topk(count).indices.tolist()
        assert len(entry) == count + (entry[chosen].rank > count)
        assert [found.rank for found in entry.values()] == sorted(found.rank for found in entry.values())
        for token, found in entry.items():
            assert found.logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
            assert found.decoded_token == llm.tokenizer.decode([token])
    total = sum(
        entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)


def test_logprobs_only_where_asked(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    params = [greedy(4), greedy(4, logprobs=0), greedy(4, prompt_logprobs=0), greedy(4)]
    outputs = llm.generate([MANY[0]] * 4, params)
    sizes = [
        (
            None if o.outputs[0].logprobs is None else len(o.outputs[0].logprobs),
            o.prompt_logprobs and len(o.prompt_logprobs),
        )
        for o in outputs
    ]
    assert sizes == [(None, None), (4, None), (None, 5), (None, None)]
    assert len({tuple(token_ids(output)) for output in outputs}) == 1


def test_prefix_cache_counts(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    shared = random_prompt(40, seed=1)
    llm.generate([shared], greedy(1))
    stats = llm._core.scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 0)
    outputs = llm.generate([[*shared, 5], [*shared[:20], 7, 8], [9, *shared]], greedy(1))
    assert [output.num_cached_tokens for output in outputs] == [32, 16, 0]
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40 + 41 + 22 + 41, 48)


def test_salted_requests_share_with_their_salt_only(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    prompt = random_prompt(40, seed=1)
    cached = []
    for salt in (None, "a", None, "a", "b"):
        [output] = llm.generate([prompt], greedy(1, cache_salt=salt))
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 32, 32, 0]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("max_tokens", [None, 31, 32, 33, 500])
def test_max_model_len_ends_the_output(
    max_tokens: int | None, streamed: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama, max_model_len=64)
    prompt = random_prompt(32, seed=1)
    output = run(llm, prompt, greedy(max_tokens), streamed=streamed)
    assert token_ids(output) == solo(tiny_llama, prompt, greedy(min(max_tokens or 32, 32)))
    assert output.outputs[0].finish_reason == "length"


def test_min_tokens_does_not_beat_max_model_len(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, max_model_len=64)
    [output] = llm.generate([random_prompt(60, seed=1)], greedy(100, min_tokens=100))
    assert (len(token_ids(output)), output.outputs[0].finish_reason) == (4, "length")


def test_longest_prompt(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, max_model_len=64)
    [output] = llm.generate([random_prompt(63, seed=1)], greedy(None))
    assert len(token_ids(output)) == 1
    with pytest.raises(InvalidPromptError, match="the prompt has 64 tokens, the model takes 64"):
        llm.generate([random_prompt(64, seed=1)], greedy(None))


@pytest.mark.parametrize("first", [1, 2, 5])
def test_seeds_do_not_depend_on_the_batch(first: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    llm = make_llm(tiny_llama)
    params = [seeded(12, seed=first * index) for index in range(len(MANY))]
    outputs = llm.generate(MANY, params)
    expected = [solo(tiny_llama, prompt, one) for prompt, one in zip(MANY, params, strict=True)]
    assert [token_ids(output) for output in outputs] == expected


@pytest.mark.parametrize("is_cached", [True, False], ids=["cache", "no_cache"])
def test_nothing_is_left_of_200_mixed_requests(
    is_cached: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """Greedy, seeded, masked, with logprobs and stops, in a tight pool; a third are aborted at any moment."""
    rng = random.Random(7)
    llm = make_llm(
        tiny_llama,
        block_size=8,
        num_blocks=20,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        enable_prefix_caching=is_cached,
    )
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"stop": ["e"]},
        {"allowed_token_ids": [20, 21, 22]},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"min_tokens": 5, "bad_words": ["k", "kk"]},
    ]
    shared = random_prompt(30, seed=1)
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    for index in range(200):
        prompt = shared[: rng.randrange(0, 30)] + random_prompt(rng.randrange(1, 30), seed=index)
        make = rng.choice([greedy, seeded])
        requests[f"r{index}"] = (prompt, make(rng.randrange(6, 40), **rng.choice(kinds)))
    waiting, live, finished = list(requests), set[str](), {}
    while waiting or live:
        for request_id in [waiting.pop() for _ in range(min(len(waiting), rng.randrange(4)))]:
            submit(llm, {request_id: requests[request_id][0]}, requests[request_id][1], stream=rng.random() < 0.5)
            live.add(request_id)
        for output in llm._frontend.step():
            if output.finished:
                live.remove(output.request_id)
                finished[output.request_id] = output
        llm._core.scheduler.check_integrity()
        if live and rng.random() < 0.3:
            victim = rng.choice(sorted(live))
            live.remove(victim)
            [aborted] = llm._frontend.abort([victim])
            assert aborted.outputs[0].finish_reason == "abort"
    assert llm._core.scheduler.stats.num_preemptions > 0
    assert 40 < len(finished) < 180
    assert_idle(llm)
    for request_id in sorted(finished)[::5]:
        prompt, params = requests[request_id]
        assert token_ids(finished[request_id]) == solo(tiny_llama, prompt, params)
