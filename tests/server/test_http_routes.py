"""The small routes, request ids, and clients that no one here wrote."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import openai
import pytest

import isthmus
from isthmus.server.settings import Tls
from server.http_server import CHAT, COMPLETIONS, MODEL, NULL, HttpServer, answer, error_of, serving, text_of

HELLO = [{"role": "user", "content": "Hello"}]


def test_models(server: HttpServer) -> None:
    listed = server.get("/v1/models").json()
    [card] = listed["data"]
    assert (listed["object"], card["id"], card["object"], card["max_model_len"]) == ("list", MODEL, "model", 512)
    assert server.get(f"/v1/models/{MODEL}").json() == card
    assert error_of(server.get("/v1/models/other/one"), 404)["code"] == "model_not_found"


def test_health_ping_version_and_load(server: HttpServer) -> None:
    ready = {"status": "ready", "stage": "ready", "num_restarts": 0}
    assert server.get("/health").json() == server.get("/ping").json() == server.post("/ping").json() == ready
    assert server.get("/version").json() == {"version": isthmus.__version__}
    assert server.get("/load").json() == {"server_load": 0}
    body = {"prompt": "a", "stream": True}
    with server.paused(), server.client() as client, client.stream("POST", COMPLETIONS, json=body):
        assert server.get("/load").json() == {"server_load": 1}
    server.wait_until(server.is_idle)


def test_tokenize_and_back(server: HttpServer) -> None:
    tokenizer = server.llm.tokenizer
    found = server.ask("/tokenize", prompt="The river", return_token_strs=True)
    assert found["tokens"] == tokenizer.encode("The river")
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    assert server.ask("/tokenize", prompt="The river", add_special_tokens=False)["tokens"] == found["tokens"][1:]
    assert server.ask("/detokenize", tokens=found["tokens"][1:]) == {"prompt": "The river"}
    chat = server.ask("/tokenize", messages=HELLO)["tokens"]
    assert server.ask("/detokenize", tokens=chat)["prompt"] == "<s>user: Hello</s>\nassistant: "
    assert server.ask(CHAT, messages=HELLO, max_tokens=1)["usage"]["prompt_tokens"] == len(chat)
    for body in ({}, {"prompt": "a", "messages": HELLO}, {"messages": []}):
        error_of(server.post("/tokenize", body), 400)
    for token_id in (-1, 384):
        assert error_of(server.post("/detokenize", {"tokens": [token_id]}), 400)["param"] == "tokens"


def test_every_answer_has_a_request_id(server: HttpServer) -> None:
    ids = {server.get(path).headers["x-request-id"] for path in ("/health", "/nothing", "/v1/models")}
    assert len(ids) == 3
    mine = {"x-request-id": "mine-1"}
    assert server.get("/nothing", headers=mine).headers["x-request-id"] == "mine-1"
    found = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=mine)
    assert (found.headers["x-request-id"], found.json()["id"]) == ("mine-1", "cmpl-mine-1")
    assert server.post(CHAT, {"messages": []}, headers=mine).headers["x-request-id"] == "mine-1"
    too_long = {"x-request-id": "x" * 129}
    assert len(server.get("/health", headers=too_long).headers["x-request-id"]) == 32
    assert server.ask(CHAT, messages=HELLO, max_tokens=1, request_id="body")["id"] == "chatcmpl-body"


def test_openapi_names_every_status_and_never_422(server: HttpServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert {COMPLETIONS, CHAT, "/v1/models", "/tokenize", "/health", "/metrics"} <= set(paths)
    statuses = set(paths[CHAT]["post"]["responses"])
    assert {"200", "400", "401", "404", "408", "413", "429", "500", "503", "504"} == statuses


# The official client.


def test_openai_completions(server: HttpServer) -> None:
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        wanted = server.llm.tokenizer.decode(answer(7, 12), skip_special_tokens=True)
        found = client.completions.create(model=MODEL, prompt="Snow fell", max_tokens=12, seed=7, n=2)
        assert (found.choices[0].text, found.choices[0].finish_reason) == (wanted, "length")
        assert found.usage is not None
        assert (found.usage.completion_tokens, found.object) == (24, "text_completion")
        stream = client.completions.create(model=MODEL, prompt="Snow fell", max_tokens=12, seed=7, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == wanted


def test_openai_chat(server: HttpServer) -> None:
    with server.openai() as client:
        found = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}],
            max_completion_tokens=9,
            seed=3,
            logprobs=True,
            top_logprobs=2,
            extra_body={"top_k": 5, "ignore_eos": True},
        )
        [choice] = found.choices
        wanted = server.llm.tokenizer.decode(answer(3, 9), skip_special_tokens=True)
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", wanted, "length")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 9
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=9,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        *chunks, last = stream
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
        assert last.usage is not None
        assert (last.choices, last.usage.completion_tokens) == ([], 9)


def test_openai_async(server: HttpServer) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> None:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            seed=seed,
            max_tokens=20,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == server.llm.tokenizer.decode(answer(seed, 20), skip_special_tokens=True)

    async def all_of_them() -> None:
        async with server.async_openai() as client:
            await asyncio.gather(*(one(client, seed) for seed in range(10)))

    asyncio.run(all_of_them())


def test_openai_errors(server: HttpServer) -> None:
    with server.openai() as client:
        with pytest.raises(openai.BadRequestError, match="temperature=-1") as bad:
            client.completions.create(model=MODEL, prompt="a", temperature=-1)
        assert (bad.value.param, bad.value.code, bad.value.type) == (
            "temperature",
            "invalid_value",
            "invalid_request_error",
        )
        assert bad.value.request_id is not None
        with pytest.raises(openai.NotFoundError, match="model 'other' is not served here; use 'tiny'"):
            client.completions.create(model="other", prompt="a")
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=400, stream=True
        )
        next(stream)
        stream.close()
    server.wait_until(server.is_idle)


def test_streamed_text_is_that_of_the_whole(server: HttpServer) -> None:
    body = {"prompt": "Snow fell", "seed": 11, "max_tokens": 60, "ignore_eos": True}
    assert text_of(server.stream(COMPLETIONS, **body)) == server.ask(COMPLETIONS, **body)["choices"][0]["text"]


def test_https(llama: Path) -> None:
    """With a certificate of its own, which has its key beside it and nobody else trusts."""
    certificate = str(Path(__file__).parent / "localhost.pem")
    with serving(llama, settings={"tls": Tls(certfile=certificate)}, **NULL) as https:
        assert https.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=certificate)
        with https.client(verify=trusted) as client:
            assert client.get("/health").json()["status"] == "ready"
        with https.client() as client, pytest.raises(httpx.ConnectError, match=r"self.signed"):
            client.get("/health")
