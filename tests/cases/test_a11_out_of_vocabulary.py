"""A11: ids outside the model's vocabulary are refused, by field; nobody else is hurt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, Solo, greedy, random_prompt, run, token_ids
from isthmus import LLM, SamplingParams
from isthmus.errors import InvalidParamsError, InvalidPromptError, RequestError
from isthmus.testing.tiny_models import tiny_model

PADDED = 400
"""Vocabulary of a model whose last ids have no token in the tokenizer."""
PROMPT = random_prompt(12, seed=1)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "padded", vocab_size=PADDED)


def assert_refused(llm: LLM, error: type[RequestError], message: str, prompt: Any, params: SamplingParams) -> None:
    with pytest.raises(error) as by_generate:
        llm.generate([PROMPT, prompt], [greedy(4), params])
    with pytest.raises(error) as by_stream:
        llm.stream(prompt, params)
    assert str(by_generate.value) == str(by_stream.value) == message
    assert by_generate.value.__notes__ == ["in prompt 1 of 2"]
    assert not llm._core.has_unfinished


@pytest.mark.parametrize("token_id", [PADDED, PADDED + 10, 2**31 - 1, -1])
@pytest.mark.parametrize("name", ["logit_bias", "logit_bias as text", "allowed_token_ids", "stop_token_ids"])
def test_parameters(name: str, token_id: int, make_llm: EngineMaker, padded: Path, solo: Solo) -> None:
    llm = make_llm(padded)
    field, _, as_text = name.partition(" ")
    value: Any = [token_id]
    if field == "logit_bias":
        value = {str(token_id) if as_text else token_id: 5}
    message = f"SamplingParams.{field}: token id {token_id} is outside [0, 400); use ids of this model's vocabulary"
    assert_refused(llm, InvalidParamsError, message, PROMPT, greedy(4, **{field: value}))
    [after] = llm.generate([PROMPT], greedy(4))
    assert token_ids(after) == solo(padded, PROMPT, greedy(4))


@pytest.mark.parametrize("token_id", [PADDED, -1, 2**40])
def test_prompt(token_id: int, make_llm: EngineMaker, padded: Path, solo: Solo) -> None:
    llm = make_llm(padded)
    message = (
        f"prompt token {token_id} is outside the vocabulary of 400 ids; encode the prompt with this model's tokenizer"
    )
    assert_refused(llm, InvalidPromptError, message, [*PROMPT, token_id], greedy(4))
    [after] = llm.generate([PROMPT], greedy(4))
    assert token_ids(after) == solo(padded, PROMPT, greedy(4))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("token_id", [0, PADDED - 1], ids=["first", "last"])
@pytest.mark.parametrize("as_text", [False, True], ids=["int", "text"])
def test_outermost_ids_are_accepted(
    as_text: bool, token_id: int, streamed: bool, make_llm: EngineMaker, padded: Path
) -> None:
    """They can be chosen too, though the last one has no text."""
    llm = make_llm(padded)
    params = greedy(3, logit_bias={str(token_id) if as_text else token_id: 100}, logprobs=2)
    output = run(llm, [token_id, *PROMPT], params, streamed=streamed)
    assert token_ids(output) == [token_id] * 3
    assert output.outputs[0].text == ""


def test_small_bias_on_the_last_id(make_llm: EngineMaker, padded: Path) -> None:
    llm = make_llm(padded)
    [output] = llm.generate([PROMPT], greedy(4, logit_bias={str(PADDED - 1): 5}))
    assert len(token_ids(output)) == 4
