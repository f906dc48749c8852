"""When a request ends, and how it shows itself."""

from __future__ import annotations

from isthmus.outputs import FinishReason
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.request import Request, RequestStatus

EOS, STOP, OTHER = 0, 7, 3


def make(*output: int, max_total_tokens: int = 100, **params: object) -> Request:
    request = Request("a", [1, 2], SamplingParams(stop_token_ids=(STOP,), **params), eos_token_ids=(EOS,))  # type: ignore[arg-type]
    request.max_total_tokens = max_total_tokens
    request.token_ids += output
    return request


def test_a_new_request_waits_with_nothing_computed() -> None:
    request = make()
    assert request.status is RequestStatus.WAITING
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (2, 2, 0)
    assert (request.num_computed_tokens, request.block_ids, request.num_cached_tokens) == (0, [], -1)


def test_the_prompt_is_copied() -> None:
    prompt = [1, 2]
    request = Request("a", prompt, SamplingParams())
    request.token_ids.append(3)
    assert prompt == [1, 2]


def test_an_ordinary_token_does_not_end_it() -> None:
    assert make(OTHER).stop_check() is None


def test_eos_ends_it_without_a_stop_reason() -> None:
    assert make(EOS).stop_check() == (FinishReason.STOP, None)


def test_ignored_eos_does_not_end_it() -> None:
    assert make(EOS, ignore_eos=True).stop_check() is None


def test_a_named_stop_token_is_the_stop_reason() -> None:
    assert make(STOP).stop_check() == (FinishReason.STOP, STOP)


def test_a_named_token_that_is_eos_too_counts_as_eos() -> None:
    request = Request("a", [1], SamplingParams(stop_token_ids=(EOS,)), eos_token_ids=(EOS,))
    request.max_total_tokens = 100
    request.token_ids.append(EOS)
    assert request.stop_check() == (FinishReason.STOP, None)


def test_a_named_eos_ends_it_although_eos_is_ignored() -> None:
    request = Request("a", [1], SamplingParams(stop_token_ids=(EOS,), ignore_eos=True), eos_token_ids=(EOS,))
    request.max_total_tokens = 100
    request.token_ids.append(EOS)
    assert request.stop_check() == (FinishReason.STOP, EOS)


def test_a_stop_token_counts_from_min_tokens_on() -> None:
    assert make(STOP, min_tokens=2).stop_check() is None
    assert make(OTHER, STOP, min_tokens=2).stop_check() == (FinishReason.STOP, STOP)


def test_the_token_limit_ends_it() -> None:
    assert make(OTHER, max_total_tokens=4).stop_check() is None
    assert make(OTHER, OTHER, max_total_tokens=4).stop_check() == (FinishReason.LENGTH, None)


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert make(OTHER, EOS, max_total_tokens=4).stop_check() == (FinishReason.STOP, None)


def test_the_limit_holds_where_min_tokens_asks_for_more() -> None:
    assert make(OTHER, EOS, min_tokens=9, max_total_tokens=4).stop_check() == (FinishReason.LENGTH, None)


def test_repr_says_how_far_it_is() -> None:
    request = make(OTHER)
    request.num_computed_tokens, request.block_ids = 2, [5]
    assert repr(request) == "Request('a', waiting, prompt 2, output 1, computed 2, 1 blocks)"


def test_a_salt_is_a_key_of_its_own() -> None:
    request = Request("a", [1], SamplingParams(cache_salt="s"), cache_keys={"adapter": "7"})
    assert request.cache_keys == {"adapter": "7", "salt": "s"}


def test_a_request_has_a_seed_even_if_nobody_gives_one() -> None:
    assert Request("a", [1], SamplingParams()).seed == 0
