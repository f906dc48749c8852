"""`/v1/embeddings`: every form of input and of vector, usage, refusals, and the official client."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from server.http_server import COMPLETIONS, CPU, HttpServer, error_of, serving
from server.poisoned import POISON, poisoned_model, poisoned_plugins

EMBEDDINGS = "/v1/embeddings"
RIVER = "The river carries the boats"


@pytest.fixture(scope="module")
def real(llama: Path) -> Iterator[HttpServer]:
    with serving(llama, max_num_batched_tokens=64, **CPU) as found:
        yield found


@pytest.fixture(scope="module")
def states(llama: Path) -> Any:
    """The last hidden states of token ids, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def of(ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        return found

    return of


def vectors(server: HttpServer, **body: Any) -> list[list[float]]:
    data = server.ask(EMBEDDINGS, **body)["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    assert {one["object"] for one in data} == {"embedding"}
    return [one["embedding"] for one in data]


def test_every_form_of_input(real: HttpServer, states: Any) -> None:
    ids = real.llm.tokenizer.encode(RIVER)
    assert ids[0] == real.llm.tokenizer.bos_token_id
    last = states(ids)[-1]
    expected = (last / last.norm()).tolist()
    forms: list[tuple[Any, int]] = [(RIVER, 1), (ids, 1), ([RIVER], 1), ([ids, [5]], 2), ([RIVER, "Snow", "a"], 3)]
    for given, count in forms:
        found = vectors(real, input=given, model="tiny")
        assert len(found) == count
        assert math.dist(found[0], expected) < 1e-4
    bare = vectors(real, input=RIVER, add_special_tokens=False)[0]
    assert math.dist(bare, vectors(real, input=ids[1:])[0]) < 1e-6
    assert math.dist(bare, expected) > 0.01


def test_the_answer(real: HttpServer) -> None:
    found = real.ask(EMBEDDINGS, input=[[5, 6, 7], [8, 9]], request_id="mine")
    assert found.pop("created") > 1.6e9
    assert [len(one["embedding"]) for one in found.pop("data")] == [64, 64]
    usage = {"prompt_tokens": 5, "total_tokens": 5}
    assert found == {"id": "embd-mine", "object": "list", "model": "tiny", "usage": usage}


def test_base64_is_the_same_in_float32(real: HttpServer) -> None:
    [floats] = vectors(real, input=RIVER, encoding_format="float")
    [text] = vectors(real, input=RIVER, encoding_format="base64")
    assert isinstance(text, str)
    found = np.frombuffer(base64.b64decode(text), dtype="<f4")
    np.testing.assert_array_equal(found, np.asarray(floats, dtype="<f4"))


def test_dimensions_and_length(real: HttpServer) -> None:
    [raw] = vectors(real, input=RIVER, normalize=False)
    [short] = vectors(real, input=RIVER, dimensions=8)
    assert math.dist(short, [value / math.hypot(*raw[:8]) for value in raw[:8]]) < 1e-6
    for wrong in (0, 65, -1):
        error = error_of(real.post(EMBEDDINGS, {"input": "a", "dimensions": wrong}), 400)
        assert (error["param"], error["code"]) == ("dimensions", "invalid_value")


def test_mean_pooling_is_an_option_of_the_server(llama: Path, states: Any) -> None:
    with serving(llama, settings={"pooling": "mean"}, max_num_batched_tokens=32, **CPU) as server:
        ids = [7, 8, 9] * 30
        mean = states(ids).mean(0)
        for _ in range(2):
            [found] = vectors(server, input=ids)
            assert math.dist(found, (mean / mean.norm()).tolist()) < 1e-4


def test_the_official_client(real: HttpServer) -> None:
    """It asks for base64 by itself."""
    expected = vectors(real, input=[RIVER, "Snow"])
    with real.openai() as client:
        found = client.embeddings.create(model="tiny", input=[RIVER, "Snow"])
        plain = client.embeddings.create(model="tiny", input=RIVER, encoding_format="float")
    assert found.usage.prompt_tokens == sum(len(real.llm.tokenizer.encode(text)) for text in (RIVER, "Snow"))
    for one, vector in zip(found.data, expected, strict=True):
        assert math.dist(one.embedding, vector) < 1e-6
    assert math.dist(plain.data[0].embedding, expected[0]) < 1e-6


@pytest.mark.parametrize("given", [[], "", [[]], [""], [[], [1]], [1, "a"], {}, None, 7, [384], [[1], [-1]], [True]])
def test_inputs_that_are_none(given: Any, real: HttpServer) -> None:
    error = error_of(real.post(EMBEDDINGS, {"input": given, "add_special_tokens": False}), 400)
    assert error["param"] == "input"


def test_how_long_an_input_may_be(real: HttpServer) -> None:
    """As long as the context: nothing follows it."""
    longest = real.llm.limits.max_model_len
    assert len(vectors(real, input=[5] * longest)) == 1
    error = error_of(real.post(EMBEDDINGS, {"input": [5] * (longest + 1)}), 400)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert str(longest) in error["message"]
    assert str(longest + 1) in error["message"]
    assert "answer" not in error["message"]
    [cut] = vectors(real, input=[9] * 10 + [5, 6, 7], truncate_prompt_tokens=3)
    assert math.dist(cut, vectors(real, input=[5, 6, 7])[0]) < 1e-5


def test_refusals(real: HttpServer) -> None:
    assert error_of(real.post(EMBEDDINGS, {"input": "a", "model": "other"}), 404)["code"] == "model_not_found"
    for field, value in (("encoding_format", "hex"), ("dimensions", "8"), ("normalize", "yes")):
        assert error_of(real.post(EMBEDDINGS, {"input": "a", field: value}), 400)["param"] == field
    assert error_of(real.post(EMBEDDINGS, {}), 400)["param"] == "input"


def test_beside_requests_for_text(real: HttpServer) -> None:
    """Both in one batch; the engine is idle afterwards."""
    body = {"prompt": RIVER, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    alone = real.ask(COMPLETIONS, **body)["choices"][0]["token_ids"]
    with real.client() as client, client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert len(vectors(real, input=[[5, index] for index in range(40)])) == 40
        for _ in lines:
            pass
    assert real.ask(COMPLETIONS, **body)["choices"][0]["token_ids"] == alone
    real.wait_until(real.is_idle)


def test_an_input_that_the_model_cannot_compute(llama: Path, tmp_path: Path, states: Any) -> None:
    """Its request fails alone; those of its batch get their vectors, a mean from its first token on again."""
    model = poisoned_model(llama, tmp_path / "poisoned")
    settings = {"pooling": "mean"}
    with serving(model, settings=settings, plugins=poisoned_plugins, max_num_batched_tokens=32, **CPU) as server:
        ids = [7, 8, 9] * 30
        mean = states(ids).mean(0)
        with ThreadPoolExecutor(2) as threads:
            with server.paused():
                bad = threads.submit(server.post, EMBEDDINGS, {"input": [9] * 50 + [POISON]})
                good = threads.submit(vectors, server, input=ids)
                server.wait_until(lambda: server.llm.num_unfinished == 2)
            assert error_of(bad.result(30), 500)["code"] == "model_failed"
            assert math.dist(good.result(30)[0], (mean / mean.norm()).tolist()) < 1e-4
