"""SamplingParams: every field refuses what it must, in words that name it."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus import outputs
from isthmus.errors import InvalidParamsError
from isthmus.sampling_params import SamplingParams

_NAMES = [item.name for item in dataclasses.fields(SamplingParams)]


def _refusal(**fields: Any) -> str:
    with pytest.raises(InvalidParamsError) as caught:
        SamplingParams(**fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 1.5}, "SamplingParams.top_p=1.5: must be in (0, 1]; use 1.0 to turn it off"),
        ({"top_p": 0}, "SamplingParams.top_p=0: must be in (0, 1]; use 1.0 to turn it off"),
        ({"min_p": -0.1}, "SamplingParams.min_p=-0.1: must be in [0, 1]; use 0.0 to turn it off"),
        ({"temperature": -1}, "SamplingParams.temperature=-1: must be a finite number >= 0; 0 means greedy"),
        ({"temperature": math.inf}, "SamplingParams.temperature=inf: must be a finite number >= 0; 0 means greedy"),
        ({"temperature": math.nan}, "SamplingParams.temperature=nan: must be a finite number >= 0; 0 means greedy"),
        (
            {"temperature": "hot"},
            "SamplingParams.temperature='hot': must be a number, not str; must be a finite number >= 0; 0 means greedy",
        ),
        ({"top_k": -2}, "SamplingParams.top_k=-2: must be >= 1, or 0 or -1 to turn it off"),
        (
            {"top_k": 5.0},
            "SamplingParams.top_k=5.0: must be an integer, not float; must be >= 1, or 0 or -1 to turn it off",
        ),
        (
            {"top_k": True},
            "SamplingParams.top_k=True: must be an integer, not bool; must be >= 1, or 0 or -1 to turn it off",
        ),
        ({"n": 0}, "SamplingParams.n=0: must be in [1, 128]; send the prompt again for more answers"),
        ({"n": 129}, "SamplingParams.n=129: must be in [1, 128]; send the prompt again for more answers"),
        ({"presence_penalty": 2.1}, "SamplingParams.presence_penalty=2.1: must be in [-2, 2]; use 0.0 to turn it off"),
        ({"frequency_penalty": -3}, "SamplingParams.frequency_penalty=-3: must be in [-2, 2]; use 0.0 to turn it off"),
        (
            {"repetition_penalty": 0},
            "SamplingParams.repetition_penalty=0: must be a finite number > 0; use 1.0 to turn it off",
        ),
        (
            {"logprobs": -1},
            "SamplingParams.logprobs=-1: must be >= 0 (0 = the sampled token only); use None to turn it off",
        ),
        ({"stop": ""}, "SamplingParams.stop='': a stop string must not be empty"),
        ({"stop": ["a", ""]}, "SamplingParams.stop=['a', '']: a stop string must not be empty"),
        ({"stop": 7}, "SamplingParams.stop=7: must be a list or tuple of strings, not int"),
        ({"bad_words": "x"}, "SamplingParams.bad_words='x': must be a list or tuple of strings, not str"),
        ({"bad_words": [""]}, "SamplingParams.bad_words=['']: a bad word must not be empty"),
        (
            {"allowed_token_ids": []},
            "SamplingParams.allowed_token_ids=[]: allows no token at all; name at least one id, "
            "or use None to allow every id",
        ),
        (
            {"logit_bias": {"abc": 1}},
            "SamplingParams.logit_bias={'abc': 1}: key 'abc' is not a token id; use integers, or their digits as text",
        ),
        (
            {"logit_bias": {5: 101}},
            "SamplingParams.logit_bias={5: 101}: the bias of token id 5 must be in [-100, 100]",
        ),
        (
            {"logit_bias": {5: 1, "5": 2}},
            "SamplingParams.logit_bias={5: 1, '5': 2}: token id 5 is given twice; keep one of them",
        ),
        ({"max_tokens": 0}, "SamplingParams.max_tokens=0: must be >= 1; use None for as much as fits in the context"),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "SamplingParams.min_tokens=5: is more than max_tokens=4; lower it or raise max_tokens",
        ),
        (
            {"stop": "x", "detokenize": False},
            "SamplingParams.stop='x': stop strings need text; set detokenize=True or use stop_token_ids",
        ),
        ({"ignore_eos": 1}, "SamplingParams.ignore_eos=1: must be True or False, not int"),
        ({"cache_salt": ""}, "SamplingParams.cache_salt='': a salt must not be empty"),
        ({"seed": 2**63}, f"SamplingParams.seed={2**63}: must fit in 64 bits, signed; use None for an arbitrary one"),
    ],
)
def test_refusals_name_field_value_and_remedy(fields: dict[str, Any], message: str) -> None:
    assert _refusal(**fields) == message


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("value", [object(), b"x", 10**400, {"x": "y"}, [None]])
def test_no_field_accepts_nonsense_or_fails_otherwise(name: str, value: object) -> None:
    assert _refusal(**{name: value}).startswith(f"SamplingParams.{name}=")


@pytest.mark.parametrize("name", _NAMES)
def test_none_is_accepted_only_where_it_is_the_default(name: str) -> None:
    if getattr(SamplingParams(), name) is None:
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        assert _refusal(**{name: None}).startswith(f"SamplingParams.{name}=None: must be")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=4))
def test_any_json_gives_params_or_the_one_error(fields: dict[str, Any]) -> None:
    refusal = None
    try:
        params = SamplingParams(**fields)
    except InvalidParamsError as error:
        refusal = str(error)
    if refusal is not None:
        assert any(refusal.startswith(f"SamplingParams.{name}=") for name in fields)
    else:
        assert isinstance(params.stop_strings, tuple)
        assert all(-100 <= bias <= 100 for bias in params.logit_bias_by_id.values())


def test_defaults_sample_the_model_as_it_is() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert params.max_tokens is None
    assert params.stop_strings == ()
    assert params.logit_bias_by_id == {}
    assert not params.is_greedy


def test_spellings_have_one_normal_form() -> None:
    params = SamplingParams(temperature=0, stop="x", logit_bias={"7": 1, 8: -2})
    assert params.is_greedy
    assert params.stop_strings == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop_strings == ("x", "y")
    assert params.logit_bias_by_id == {7: 1.0, 8: -2.0}


def test_frozen_picklable_replaceable() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"], seed=-3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=4).seed == 4
    with pytest.raises(InvalidParamsError):
        dataclasses.replace(params, top_p=2)


@pytest.mark.parametrize("vocab_size", [10, 1000])
def test_ids_outside_the_vocabulary_a11(vocab_size: int) -> None:
    last, beyond = vocab_size - 1, vocab_size
    SamplingParams(logit_bias={str(last): 5}, allowed_token_ids=[0], stop_token_ids=[last]).check_vocab(vocab_size)
    for token_id in (beyond, beyond + 10, -1):
        for name, value in (
            ("logit_bias", {str(token_id): 5}),
            ("logit_bias", {token_id: 5}),
            ("allowed_token_ids", [0, token_id]),
            ("stop_token_ids", (token_id,)),
        ):
            with pytest.raises(InvalidParamsError) as caught:
                SamplingParams(**{name: value}).check_vocab(vocab_size)
            assert str(caught.value) == (
                f"SamplingParams.{name}: token id {token_id} is outside [0, {vocab_size}); "
                "use ids of this model's vocabulary"
            )


def test_masks_that_leave_nothing_a10() -> None:
    allowed = SamplingParams(allowed_token_ids=[3, 4], bad_words=["w"])
    allowed.check_masks([(3,), (4, 4)], vocab_size=10)
    with pytest.raises(InvalidParamsError) as caught:
        allowed.check_masks([(3,), (4,)], vocab_size=10)
    assert str(caught.value) == (
        "SamplingParams.bad_words: bans every id of allowed_token_ids, so no token is left to sample; "
        "allow another id or drop a ban"
    )
    with pytest.raises(InvalidParamsError, match="bad_words: bans every id of the vocabulary, so"):
        SamplingParams(bad_words=["a", "b"]).check_masks([(0,), (1,)], vocab_size=2)


def test_min_tokens_counts_as_a_mask() -> None:
    params = SamplingParams(allowed_token_ids=[3], min_tokens=1)
    params.check_masks((), vocab_size=10, stop_ids={4})
    SamplingParams(allowed_token_ids=[3]).check_masks((), vocab_size=10, stop_ids={3})
    with pytest.raises(InvalidParamsError, match="min_tokens: bans every id of allowed_token_ids, so"):
        params.check_masks((), vocab_size=10, stop_ids={3})
    both = SamplingParams(allowed_token_ids=[3, 4], min_tokens=1, bad_words=["w"])
    with pytest.raises(InvalidParamsError, match="bad_words: bans every id of allowed_token_ids together with min_tok"):
        both.check_masks([(4,)], vocab_size=10, stop_ids={3})


def test_outputs_are_plain_data() -> None:
    metrics = outputs.RequestMetrics(arrival_s=1.0, first_token_s=1.5)
    assert metrics.time_to_first_token_s == 0.5
    assert outputs.RequestMetrics(arrival_s=1.0).time_to_first_token_s is None
    answer = outputs.CompletionOutput(index=0, text="a", token_ids=[1], logprobs=[{1: outputs.Logprob(-0.1, 1)}])
    assert not answer.is_finished
    assert dataclasses.replace(answer, finish_reason=outputs.FinishReason.STOP).is_finished
    result = outputs.RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[5], outputs=[answer], finished=False, metrics=metrics
    )
    assert pickle.loads(pickle.dumps(result)) == result
    assert f"{outputs.FinishReason.LENGTH}" == "length"
