"""`/v1/completions`: prompts in all forms, echo, log-probabilities, ids, seeds (case A8), streamed and not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus import SchedulingParams
from isthmus.server.protocol.completion import CompletionRequest
from isthmus.server.sampling import scheduling_params
from server.http_server import (
    COMPLETIONS,
    CPU,
    HttpServer,
    answer,
    choices_of,
    error_of,
    ids_of,
    serving,
    text_of,
)

RIVER = "The river carries the boats"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def real(llama: Path) -> Iterator[HttpServer]:
    """A model that computes, with prompts in parts."""
    with serving(llama, max_num_batched_tokens=64, **CPU) as found:
        yield found


def test_every_form_of_prompt(server: HttpServer) -> None:
    ids = server.llm.tokenizer.encode(RIVER)
    forms: list[tuple[Any, int]] = [(RIVER, 1), (ids, 1), ([RIVER], 1), ([ids, [5], [6, 7]], 3), ([RIVER, "Snow"], 2)]
    for prompt, count in forms:
        body = {"prompt": prompt, "seed": 5, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, "n": 2}
        found = server.ask(COMPLETIONS, **body)
        assert [choice["index"] for choice in found["choices"]] == list(range(2 * count))
        assert [choice["token_ids"] for choice in found["choices"]] == [answer(5, 4), answer(6, 4)] * count
        if prompt in (RIVER, ids):
            assert found["choices"][0]["prompt_token_ids"] == ids
        events = server.stream(COMPLETIONS, **body)
        assert [ids_of(events, index) for index in range(2 * count)] == [answer(5, 4), answer(6, 4)] * count
        firsts = [choices_of(events, index)[0]["prompt_token_ids"] for index in range(2 * count)]
        assert firsts == [choice["prompt_token_ids"] for choice in found["choices"]]


@pytest.mark.parametrize(
    "prompt", [[], "", [[]], [""], [[], [1]], [1, "a"], {"a": 1}, None, 7, [384], [-1], [[1], [384]], [True], [1.5]]
)
def test_prompts_that_are_none(prompt: Any, server: HttpServer) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "add_special_tokens": False}
    assert error_of(server.post(COMPLETIONS, body), 400)["param"] == "prompt"


def test_the_default_is_sixteen_tokens(server: HttpServer) -> None:
    assert server.ask(COMPLETIONS, prompt=RIVER, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_the_rest_of_a_prompt_that_is_too_long(server: HttpServer) -> None:
    ids = [index % 300 + 3 for index in range(600)]
    body = {"prompt": ids, "max_tokens": 2, "return_token_ids": True}
    for keep, rest in ((8, ids[-8:]), (-1, ids[-511:])):
        found = server.ask(COMPLETIONS, truncate_prompt_tokens=keep, **body)
        assert found["choices"][0]["prompt_token_ids"] == rest
    assert error_of(server.post(COMPLETIONS, {**body, "truncate_prompt_tokens": 0}), 400)["code"] == "invalid_value"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_echo(streamed: bool, real: HttpServer) -> None:
    ids = real.llm.tokenizer.encode(RIVER)
    plain = real.ask(COMPLETIONS, prompt=RIVER, max_tokens=6, **GREEDY)["choices"][0]["text"]
    special = real.llm.tokenizer.decode(ids)
    for prompt, shown in ((RIVER, RIVER), (ids, special)):
        body = {"prompt": prompt, "max_tokens": 6, "echo": True, "n": 1, **GREEDY}
        if streamed:
            assert text_of(real.stream(COMPLETIONS, **body)) == shown + plain
        else:
            assert real.ask(COMPLETIONS, **body)["choices"][0]["text"] == shown + plain


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("length", [5, 150], ids=["short", "in parts"])
def test_echo_with_logprobs(length: int, streamed: bool, real: HttpServer) -> None:
    """Of prompt and output, also of a prompt that is computed in several steps."""
    ids = [index * 7 % 300 + 3 for index in range(length)]
    body = {"prompt": ids, "max_tokens": 3, "echo": True, "logprobs": 2, "return_tokens_as_token_ids": True, **GREEDY}
    if streamed:
        parts = [choice["logprobs"] for choice in choices_of(real.stream(COMPLETIONS, **body))]
        found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    else:
        found = real.ask(COMPLETIONS, **body)["choices"][0]["logprobs"]
    assert found["tokens"][:length] == [f"token_id:{token_id}" for token_id in ids]
    assert {len(values) for values in found.values()} == {length + 3}
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert all(-100 < value <= 0 for value in found["token_logprobs"][1:])
    for token, logprob, top in list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[
        1:
    ]:
        assert top[token] == logprob
        assert len(top) in (2, 3)
    assert found["text_offset"][0] == 0
    assert found["text_offset"] == sorted(found["text_offset"])


def test_only_the_prompt(real: HttpServer) -> None:
    """As evaluation harnesses score texts."""
    ids = real.llm.tokenizer.encode(RIVER)
    found = real.ask(COMPLETIONS, prompt=RIVER, max_tokens=0, echo=True, logprobs=1)
    [choice] = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (RIVER, "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert (found["usage"]["completion_tokens"], found["usage"]["total_tokens"]) == (0, len(ids))
    events = real.stream(COMPLETIONS, prompt=RIVER, max_tokens=0, echo=True)
    assert text_of(events) == RIVER
    assert error_of(real.post(COMPLETIONS, {"prompt": RIVER, "max_tokens": 0}), 400)["param"] == "max_tokens"


def test_prompt_logprobs(real: HttpServer) -> None:
    ids = real.llm.tokenizer.encode(RIVER)
    found = real.ask(COMPLETIONS, prompt=ids, max_tokens=1, prompt_logprobs=1, **GREEDY)["choices"][0][
        "prompt_logprobs"
    ]
    assert len(found) == len(ids)
    assert found[0] is None
    for token_id, entry in list(zip(ids, found, strict=True))[1:]:
        assert entry[str(token_id)]["logprob"] <= 0
        assert 1 in {candidate["rank"] for candidate in entry.values()}
    events = real.stream(COMPLETIONS, prompt=ids, max_tokens=3, prompt_logprobs=1, **GREEDY)
    told = [choice["prompt_logprobs"] for choice in choices_of(events) if "prompt_logprobs" in choice]
    assert told == [found]


def test_logprobs_keep_candidates_apart_that_read_the_same(real: HttpServer) -> None:
    """Case A17 in this form: five at every position, though bytes of cut characters decode alike."""
    for prompt in (RIVER, "Snow fell", [200, 201, 202]):
        body = {"prompt": prompt, "max_tokens": 10, "logprobs": 5, **GREEDY}
        whole = real.ask(COMPLETIONS, **body)["choices"][0]["logprobs"]
        assert [len(top) for top in whole["top_logprobs"]] == [5] * 10
        for token, logprob, top in zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True):
            assert max(top.values()) == top[token] == logprob
            assert math.fsum(map(math.exp, top.values())) <= 1 + 1e-6
        parts = [choice["logprobs"] for choice in choices_of(real.stream(COMPLETIONS, **body))]
        assert {name: [value for part in parts for value in part[name]] for name in whole} == whole


def test_logprobs_of_none_but_the_chosen(real: HttpServer) -> None:
    found = real.ask(COMPLETIONS, prompt=RIVER, max_tokens=3, logprobs=0, **GREEDY)["choices"][0]["logprobs"]
    assert [list(top) for top in found["top_logprobs"]] == [[token] for token in found["tokens"]]
    assert error_of(real.post(COMPLETIONS, {"prompt": RIVER, "logprobs": 21}), 400)["param"] == "logprobs"


def test_suffix_and_best_of(server: HttpServer) -> None:
    assert server.ask(COMPLETIONS, prompt=RIVER, suffix="", best_of=2, n=2)["choices"]
    for name, value in (("suffix", "."), ("best_of", 3)):
        error = error_of(server.post(COMPLETIONS, {"prompt": RIVER, name: value}), 400)
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_beam_search(real: HttpServer) -> None:
    body = {"prompt": RIVER, "use_beam_search": True, "n": 3, "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    found = real.ask(COMPLETIONS, **body)
    texts = [choice["text"] for choice in found["choices"]]
    assert len(set(texts)) == 3
    assert found["usage"]["completion_tokens"] == 15
    events = real.stream(COMPLETIONS, **body)
    assert [text_of(events, index) for index in range(3)] == texts
    assert error_of(real.post(COMPLETIONS, {**body, "stop": "a"}), 400)["param"] == "stop"
    assert error_of(real.post(COMPLETIONS, {**body, "n": 1}), 400)["param"] == "beam_width"


def test_parameters_reach_the_sampler(real: HttpServer) -> None:
    """One token each, of what would be another."""
    body = {"prompt": RIVER, "max_tokens": 3, "return_token_ids": True, "temperature": 0}

    def ids(**changes: Any) -> list[int]:
        found: list[int] = real.ask(COMPLETIONS, **{**body, **changes})["choices"][0]["token_ids"]
        return found

    first, second, third = plain = ids()
    other = 77
    assert ids(logit_bias={str(first): -100})[0] != first
    assert ids(logit_bias={str(other): 100}) == [other] * 3
    assert ids(allowed_token_ids=[other, 78])[0] in (other, 78)
    assert ids(temperature=5, top_k=1, seed=1) == ids(temperature=5, top_p=0.001, seed=1) == ids(temperature=5, min_p=1)
    assert ids(stop_token_ids=[second]) == [first, second]
    assert ids(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0) == plain
    assert ids(logit_bias={str(other): 100}, frequency_penalty=2.0, max_tokens=60) != [other] * 60
    word = real.llm.tokenizer.decode([other])
    assert word.isprintable()
    assert other not in ids(logit_bias={str(other): 100}, bad_words=[word])
    eos = real.llm.tokenizer.eos_token_id
    assert ids(logit_bias={str(eos): 100}) == [eos]
    assert ids(logit_bias={str(eos): 100}, min_tokens=2)[-1] == eos
    assert len(ids(logit_bias={str(eos): 100}, min_tokens=2)) == 3
    assert ids(logit_bias={str(eos): 100}, ignore_eos=True) == [eos] * 3
    assert third in plain


def test_a_seed_gives_the_same_whatever_runs_beside_it(real: HttpServer) -> None:
    """Case A8."""
    seeded = {"prompt": RIVER, "seed": 42, "temperature": 2.0, "max_tokens": 16, "ignore_eos": True}
    with real.openai() as client:

        def both(other_seed: int | None) -> tuple[str, str]:
            prompts = [
                client.completions.create(
                    model="tiny",
                    prompt=RIVER,
                    seed=seed,
                    temperature=2.0,
                    max_tokens=16,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                for seed in (42, other_seed)
            ]
            texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in prompts]
            return texts[0], texts[1]

        pairs = [both(None) for _ in range(4)]
        found = {mine for mine, _ in [*pairs, both(7)]} | {real.ask(COMPLETIONS, **seeded)["choices"][0]["text"]}
    assert len(found) == 1
    assert len({other for _, other in pairs}) >= 2


def test_a_salt_keeps_prefixes_apart(real: HttpServer) -> None:
    def cached(**body: Any) -> int:
        usage = real.ask(COMPLETIONS, prompt=[9] * 64, max_tokens=1, **body)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0]
    assert cached(cache_salt="a") > 0
    assert error_of(real.post(COMPLETIONS, {"prompt": "a", "cache_salt": ""}), 400)["param"] == "cache_salt"


def test_defaults_are_those_of_the_models_makers(llama: Path, tmp_path: Path) -> None:
    """Unless the request says otherwise, or the server."""
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    found = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**found, "top_k": 1, "temperature": 5.0}))
    with serving(tmp_path, **CPU) as server:
        body = {"prompt": RIVER, "max_tokens": 12, "ignore_eos": True}
        greedy = server.ask(COMPLETIONS, **body, temperature=0)["choices"][0]["text"]
        texts = {server.ask(COMPLETIONS, **body, seed=seed)["choices"][0]["text"] for seed in range(5)}
        assert texts == {greedy}
        assert len({server.ask(COMPLETIONS, **body, top_k=0, seed=seed)["choices"][0]["text"] for seed in range(5)}) > 1
    with serving(tmp_path, settings={"use_generation_config": False}, **CPU) as server:
        assert not server.context.sampling_defaults


def test_who_asks_and_how_urgently() -> None:
    body = CompletionRequest(prompt="a", priority=-3, user="ada")
    assert scheduling_params(body, None) == SchedulingParams(priority=-3, tenant="ada")
    assert scheduling_params(body, "key-1") == SchedulingParams(priority=-3, tenant="key-1")
    assert scheduling_params(CompletionRequest(prompt="a"), None) == SchedulingParams()
