"""SmolLM2 writes what is asked for, whatever happens to its requests on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from e2e.engines import assert_idle
from e2e.structured_cases import CASES, PERSON
from isthmus import LLM, FinishReason, SamplingParams, StructuredOutput

pytestmark = pytest.mark.timeout(600)

QUESTIONS = {
    "json": "Invent a person. Answer with JSON that has name, age and likes.",
    "regex": "Write a code of letters and digits.",
    "choice": "Where do ships sail?",
    "grammar": "Write a sum.",
}
BOOK: dict[str, Any] = {
    "$defs": {
        "part": {
            "type": "object",
            "properties": {
                "title": {"type": "string", "maxLength": 16},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 1},
            },
            "required": ["title"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {
        "book": {"$ref": "#/$defs/part"},
        "year": {"type": "integer", "minimum": 1500, "maximum": 2024},
        "isbn": {"type": "string", "pattern": "^97[89]-[0-9]{10}$"},
        "price": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0, "maximum": 100}]},
    },
    "required": ["year", "isbn", "price"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """With blocks for about three requests, so that some give way, and steps that run ahead."""
    with LLM(
        "smollm2-135m-instruct",
        device="cpu",
        dtype="float32",
        block_size=16,
        num_blocks=20,
        max_num_seqs=8,
        max_model_len=320,
        max_num_batched_tokens=48,
        async_scheduling=True,
        scheduler__artificial_preemption_rate=0.1,
    ) as made:
        yield made
        assert made._core.scheduler.stats.num_preemptions > 0
        assert_idle(made)


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_every_kind_at_once(llm: LLM) -> None:
    asked = [(case, seed) for case in CASES for seed in range(3)]
    params = [
        SamplingParams(temperature=0.0 if seed == 0 else 1.0, seed=seed, max_tokens=80, structured=CASES[case].spec)
        for case, seed in asked
    ]
    outputs = llm.chat([conversation(QUESTIONS[case]) for case, _ in asked], params, progress=False)
    for output, (case, _) in zip(outputs, asked, strict=True):
        assert CASES[case].follows(output.outputs[0].text), output.outputs[0].text
        assert output.outputs[0].finish_reason is FinishReason.STOP


def test_a_schema_of_many_things(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=160, structured=StructuredOutput(json=BOOK))
    [output] = llm.chat(conversation("Describe a book as JSON."), params, progress=False)
    assert len({completion.text for completion in output.outputs}) == 2
    for completion in output.outputs:
        assert completion.finish_reason is FinishReason.STOP
        Draft202012Validator(BOOK).validate(json.loads(completion.text))


def test_any_object_and_blanks_that_end(llm: LLM) -> None:
    """The bias is for blanks, which a model could write for ever."""
    blank = llm.tokenizer.encode("\n", add_special_tokens=False)[0]
    structured = StructuredOutput(json_object=True)
    params = SamplingParams(temperature=0, max_tokens=40, structured=structured, logit_bias={blank: 100})
    [output] = llm.chat(conversation("Give me the capital of France as JSON."), params, progress=False)
    text = output.outputs[0].text
    assert text.startswith("{" + "\n" * 32)
    assert not re.search(r"\s{33}", text)


def test_what_the_model_knows_is_said(llm: LLM) -> None:
    """A grammar takes nothing away but what it forbids."""
    schema = {**PERSON, "properties": {**PERSON["properties"], "age": {"type": "integer"}}}
    params = SamplingParams(temperature=0, max_tokens=80, structured=StructuredOutput(json=schema))
    [output] = llm.chat(
        conversation("Tom is 6 years old and likes tea. Answer with JSON: name, age, likes."), params, progress=False
    )
    found = json.loads(output.outputs[0].text)
    assert (found["name"], found["age"]) == ("Tom", 6)
