"""What a structured output may be asked to be, and how a wrong one is refused."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from isthmus import SamplingParams, StructuredOutput
from isthmus.engine.messages import encoder
from isthmus.engine.request_data import RequestData, pack, unpack
from isthmus.errors import InvalidParamsError
from isthmus.scheduler.request import Request
from isthmus.structured.spec import MAX_PATTERN_BYTES, MAX_SCHEMA_BYTES

EACH: dict[str, dict[str, Any]] = {
    "json": {"json": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "é😀"}}}},
    "json text": {"json": '{"type": "integer"}'},
    "json true": {"json": True},
    "json_object": {"json_object": True},
    "regex": {"regex": r"\d+"},
    "choice": {"choice": ["yes", "no"]},
    "grammar": {"grammar": 'root ::= "x"'},
    "compact": {"json": {"type": "integer"}, "disable_any_whitespace": True},
    "spaced": {"json": {"type": "integer"}, "whitespace_pattern": " "},
}
each = pytest.mark.parametrize("fields", EACH.values(), ids=EACH.keys())


@each
def test_it_is_a_key_and_can_be_pickled(fields: dict[str, Any]) -> None:
    spec = StructuredOutput(**fields)
    assert spec == StructuredOutput(**fields) == pickle.loads(pickle.dumps(spec))
    assert hash(spec) == hash(StructuredOutput(**fields))
    assert len({spec, *(StructuredOutput(**other) for other in EACH.values())}) == len(EACH)
    assert spec.kind == next(name for name in fields if fields[name] and name in StructuredOutput.__dataclass_fields__)


@each
def test_it_reaches_an_engine_in_another_process(fields: dict[str, Any]) -> None:
    params = SamplingParams(structured=StructuredOutput(**fields), n=2)
    leader = Request("a", [1, 2], params, seed=3)
    written = encoder().encode(pack([leader, leader.sibling("b", 4)]))
    found = unpack(msgspec.msgpack.decode(written, type=RequestData))
    assert [one.request_id for one in found] == ["a", "b"]
    assert all(one.params == params for one in found)


def test_a_schema_is_kept_as_text_and_its_properties_in_order() -> None:
    schema = MappingProxyType(OrderedDict(properties=MappingProxyType({"z": True, "a": {"enum": ("é",)}})))
    assert StructuredOutput(json=schema).json == '{"properties":{"z":true,"a":{"enum":["é"]}}}'
    assert StructuredOutput(json=True) == StructuredOutput(json={})
    assert StructuredOutput(json=' {"a" : 1}').json == StructuredOutput(json={"a": 1}).json == '{"a":1}'


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "nothing given; give exactly one of"),
    "two": ({"regex": "a", "choice": ["a"]}, "regex and choice given; give exactly one of"),
    "object and schema": ({"json": {}, "json_object": True}, "json and json_object given"),
    "a flag that is none": ({"json_object": 1}, "json_object=1: must be True or False"),
    "no JSON": ({"json": "{"}, "json='{': is not JSON"),
    "a list": ({"json": "[]"}, "must be an object or true, not a list"),
    "a number": ({"json": 5}, "must be an object or true, not a int"),
    "false": ({"json": False}, "not false, which allows nothing"),
    "nan": ({"json": {"const": float("nan")}}, "is not JSON"),
    "a set": ({"json": {"enum": {1}}}, "a set has no form in JSON"),
    "too deep": ({"json": "[" * 100_000}, "is not JSON"),
    "too long": ({"json": {"const": "x" * MAX_SCHEMA_BYTES}}, "131072 are allowed; make it smaller"),
    "too many choices": ({"choice": ["x" * 1024] * 129}, "has 132096 bytes"),
    "no choices": ({"choice": []}, "must be a list of at least one text"),
    "one text": ({"choice": "yes"}, "must be a list of at least one text"),
    "an empty choice": ({"choice": ["a", ""]}, "each must be text, and not empty"),
    "a numeric choice": ({"choice": ["a", 1]}, "each must be text, and not empty"),
    "no regex": ({"regex": ""}, "must be text, and not empty"),
    "a regex that is none": ({"regex": 5}, "must be text, and not empty"),
    "a long regex": ({"regex": "é" * (MAX_PATTERN_BYTES // 2 + 1)}, "has 32770 bytes, 32768 are allowed"),
    "half a pair": ({"regex": "\ud800"}, "half of a surrogate pair"),
    "blanks in a regex": ({"regex": "a", "disable_any_whitespace": True}, "is for JSON only"),
    "blanks or none": ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradicts"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParamsError) as error:
        StructuredOutput(**fields)
    assert str(error.value).startswith("StructuredOutput")
    assert message in str(error.value)
    assert len(str(error.value)) < 400


def test_the_limits_are_inclusive() -> None:
    StructuredOutput(regex="x" * MAX_PATTERN_BYTES)
    empty = len(json.dumps({"const": ""}, separators=(",", ":")))
    StructuredOutput(json={"const": "x" * (MAX_SCHEMA_BYTES - empty)})


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(InvalidParamsError, match=r"structured=\{'regex': 'a'\}: must be a StructuredOutput, not dict"):
        SamplingParams(structured={"regex": "a"})  # type: ignore[arg-type]
