"""Beam search without an engine: a group is fed by a table-like model, and compared with the search written plainly."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import InvalidParamsError
from isthmus.outputs import FinishReason
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.output import BeamSequence, RawLogprobs
from isthmus.scheduler.request import Request
from isthmus.testing.reference_beam import NextLogprobs, plain_beam_search

PROMPT = (7, 8)


def random_model(vocab_size: int, seed: int) -> NextLogprobs:
    """Logits between 0 and 4, so that several tokens are likely and none is certain."""

    def logprobs(output: Sequence[int]) -> list[float]:
        draws = random.Random(f"{seed} {list(output)}")
        logits = [4 * draws.random() for _ in range(vocab_size)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return logprobs


def most_likely(logprobs: Sequence[float], count: int) -> RawLogprobs:
    """As a worker gives them."""
    ranked = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))[:count]
    return {token: (logprobs[token], rank) for rank, token in enumerate(ranked, 1)}


def group_of(params: BeamSearchParams, eos_token_ids: Collection[int], max_tokens: int) -> BeamGroup:
    stop_ids = {*eos_token_ids, *params.stop_token_ids}
    leader = Request("r", PROMPT, params.of_a_beam(len(stop_ids)), eos_token_ids=tuple(eos_token_ids))
    group = BeamGroup(params, leader)
    group.begin(max_tokens)
    return group


def feed(group: BeamGroup, model: NextLogprobs) -> None:
    """One step of every beam."""
    requests = list(group.requests)
    for request in requests:
        count = request.params.logprobs
        assert count is not None
        is_last = group.take_candidates(request, most_likely(model(request.token_ids[len(PROMPT) :]), count))
        assert is_last == (request is requests[-1])


def search(params: BeamSearchParams, model: NextLogprobs, eos_token_ids: Collection[int], max_tokens: int) -> BeamGroup:
    """A whole search. The beams after each step are checked to be requests in their own right."""
    group = group_of(params, eos_token_ids, max_tokens)
    live = {request.request_id: request for request in group.requests}
    while live:
        feed(group, model)
        changes = group.advance(live)
        for request in changes.forked:
            assert request.request_id not in live
            assert request.leader is not None
            live[request.request_id] = request
        for request in changes.ended:
            del live[request.request_id]
        assert list(live.values()) == sorted(group.requests, key=list(live.values()).index)
        for request in group.requests:
            assert request.num_tokens + 1 == request.max_total_tokens
    return group


def as_pairs(found: Sequence[BeamSequence]) -> list[tuple[list[int], float]]:
    return [(sequence.token_ids, pytest.approx(sequence.score)) for sequence in found]


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32),
    width=st.integers(2, 5),
    max_tokens=st.integers(1, 9),
    penalty=st.sampled_from((-1.0, 0.0, 0.5, 1.0, 2.0)),
    early_stopping=st.sampled_from((False, True, "never")),
    num_eos=st.integers(0, 3),
    num_stop=st.integers(0, 2),
)
def test_equals_the_plain_search(
    seed: int,
    width: int,
    max_tokens: int,
    penalty: float,
    early_stopping: bool | str,
    num_eos: int,
    num_stop: int,
) -> None:
    eos, stop = range(num_eos), range(num_eos, num_eos + num_stop)
    params = BeamSearchParams(
        beam_width=width, length_penalty=penalty, early_stopping=early_stopping, stop_token_ids=tuple(stop)
    )
    model = random_model((1 + num_eos + num_stop) * width + 1, seed)
    group = search(params, model, eos, max_tokens)
    assert as_pairs(group.finished) == plain_beam_search(params, model, {*eos, *stop}, max_tokens)
    for sequence in group.finished:
        last = sequence.token_ids[-1]
        expected = (FinishReason.STOP, last) if last in stop else (FinishReason.STOP, None)
        ended = (sequence.finish_reason, sequence.stop_reason)
        assert ended == (expected if last in {*eos, *stop} else (FinishReason.LENGTH, None))
        outputs = [sequence.token_ids[:index] for index in range(len(sequence.token_ids))]
        logprobs = [model(output)[token] for output, token in zip(outputs, sequence.token_ids, strict=True)]
        assert sequence.logprob == pytest.approx(sum(logprobs))
        assert sequence.score == pytest.approx(sequence.logprob / len(sequence.token_ids) ** penalty)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_enough_for_everything_find_the_best_of_all(penalty: float) -> None:
    """Three tokens, one of which ends: with a beam for each of the 2**4 outputs, nothing is ever given up."""
    model, max_tokens, eos = random_model(3, seed=5), 4, 0
    going_on = [list(output) for n in range(max_tokens) for output in itertools.product((1, 2), repeat=n)]
    outputs = [[*output, eos] for output in going_on]
    outputs += [list(output) for output in itertools.product((1, 2), repeat=max_tokens)]
    scores = {
        tuple(output): sum(model(output[:index])[token] for index, token in enumerate(output)) / len(output) ** penalty
        for output in outputs
    }
    params = BeamSearchParams(beam_width=len(outputs), length_penalty=penalty, early_stopping="never")
    found = search(params, model, [eos], max_tokens).finished
    best = sorted(scores, key=lambda output: -scores[output])
    assert [tuple(sequence.token_ids) for sequence in found] == best


def test_the_candidates_of_a_beam_are_enough() -> None:
    """All stop tokens lead, and the beams that go on all come from one parent."""
    params = BeamSearchParams(beam_width=3, stop_token_ids=(0, 1), early_stopping="never")
    group = group_of(params, (2,), max_tokens=5)
    logprobs = [-1.0, -1.1, -1.2, -2.0, -2.1, -2.2, -2.3]
    (leader,) = group.requests
    assert leader.params.logprobs == 6
    feed(group, lambda output: logprobs)
    group.advance(())
    assert [request.token_ids[-1] for request in group.requests] == [3, 4, 5]
    assert [sequence.token_ids for sequence in group.finished] == [[0], [1], [2]]


def test_a_request_goes_on_with_the_best_of_its_beam_and_the_others_fork() -> None:
    params = BeamSearchParams(beam_width=3)
    group = group_of(params, (), max_tokens=5)
    (leader,) = group.requests
    leader.num_placeholders = 1
    leader.claim = (1.0, 1)
    feed(group, lambda output: [-3.0, -1.0, -2.0])
    changes = group.advance({"r", "r#1"})
    assert [request.request_id for request in group.requests] == ["r", "r#2", "r#3"]
    assert [request.token_ids for request in group.requests] == [[*PROMPT, 1], [*PROMPT, 2], [*PROMPT, 0]]
    assert changes.forked == [request for request in group.requests if request is not leader]
    assert changes.ended == []
    assert all(request.leader is leader for request in changes.forked)
    assert all(request.claim is None for request in changes.forked)
    assert leader.num_placeholders == 0

    by_last_token = {1: [-9.0, -9.1, -9.2], 2: [-0.1, -0.2, -9.0], 0: [-0.3, -9.0, -9.0]}
    feed(group, lambda output: by_last_token[output[-1]])
    changes = group.advance({"r", "r#2", "r#3"})
    assert [request.request_id for request in group.requests] == ["r#2", "r#4", "r#3"]
    assert [request.token_ids[2:] for request in group.requests] == [[2, 0], [2, 1], [0, 0]]
    assert changes.ended == [leader]


def test_a_group_waits_for_its_last_beam() -> None:
    group = group_of(BeamSearchParams(beam_width=2), (), max_tokens=5)
    feed(group, lambda output: [-1.0, -2.0])
    group.advance(())
    first, second = group.requests
    assert not group.take_candidates(first, {0: (-1.0, 1), 1: (-2.0, 2)})
    assert group.has_candidates(first)
    assert not group.has_candidates(second)
    assert group.take_candidates(second, {0: (-1.0, 1), 1: (-2.0, 2)})


def test_a_fork_shares_the_names_of_contents_and_nothing_else() -> None:
    group = group_of(BeamSearchParams(beam_width=2), (), max_tokens=5)
    (leader,) = group.requests
    leader.block_ids, leader.block_hashes, leader.num_published_blocks = [3, 4], [b"hash"], 1
    leader.num_computed_tokens = 2
    feed(group, lambda output: [-1.0, -2.0])
    (fork,) = group.advance(()).forked
    assert fork.block_hashes == [b"hash"]
    assert fork.block_hashes is not leader.block_hashes
    assert (fork.block_ids, fork.num_published_blocks, fork.num_computed_tokens) == ([], 0, 0)
    assert leader.block_ids == [3, 4]


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "ends"),
    [
        (True, 1.0, True),
        (False, 1.0, True),
        ("never", 0.0, True),
        ("never", -1.0, True),
        ("never", 1.0, False),  # At full length the beam would score -0.6.
    ],
)
def test_the_search_ends_when_no_beam_is_good_enough(early_stopping: bool | str, penalty: float, ends: bool) -> None:
    """Two sequences have ended at -1.0; the best beam is at -3.0."""
    params = BeamSearchParams(beam_width=2, length_penalty=penalty, early_stopping=early_stopping)
    group = group_of(params, (0, 1), max_tokens=5)
    feed(group, lambda output: [-1.0, -1.0, -3.0, -4.0])
    group.advance(())
    assert (not list(group.requests)) is ends


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "ends"),
    [
        (True, 0.0, True),
        (False, 0.0, False),
        ("never", 0.0, False),
        # Scored as if it were long already, it would not be good enough; but it is best when it ends soon.
        ("never", -1.0, False),
    ],
)
def test_whether_a_beam_that_is_good_enough_goes_on(early_stopping: bool | str, penalty: float, ends: bool) -> None:
    """Two sequences have ended, with log-probabilities -0.5 and -4.6; the best beam is at -0.7."""
    params = BeamSearchParams(beam_width=2, length_penalty=penalty, early_stopping=early_stopping)
    group = group_of(params, (0,), max_tokens=50)
    feed(group, lambda output: [-0.5, -9.0, -0.6, -7.0])
    group.advance(())
    feed(group, lambda output: [-4.0, -9.0, -0.1, -9.0])
    group.advance(())
    assert [sequence.logprob for sequence in group.finished] == pytest.approx([-0.5, -4.6])
    assert (not list(group.requests)) is ends


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"beam_width": 1},
            "BeamSearchParams.beam_width=1: must be in [2, 128]; one beam is SamplingParams(temperature=0)",
        ),
        ({"beam_width": 2.0}, "BeamSearchParams.beam_width=2.0: must be an integer, not float; must be in [2, 128]"),
        ({"early_stopping": "always"}, "BeamSearchParams.early_stopping='always': must be True, False or \"never\""),
        ({"early_stopping": 1}, 'BeamSearchParams.early_stopping=1: must be True, False or "never"'),
        ({"length_penalty": math.nan}, "BeamSearchParams.length_penalty=nan: must be in [-10.0, 10.0]"),
        (
            {"length_penalty": 11},
            "BeamSearchParams.length_penalty=11: must be in [-10.0, 10.0]; use 0.0 to turn it off",
        ),
        ({"max_tokens": 0}, "BeamSearchParams.max_tokens=0: must be >= 1; use None for as much as fits"),
        ({"stop_token_ids": "ab"}, "BeamSearchParams.stop_token_ids='ab': must be a list or tuple of token ids"),
        ({"ignore_eos": 1}, "BeamSearchParams.ignore_eos=1: must be True or False, not int"),
        ({"cache_salt": ""}, "BeamSearchParams.cache_salt='': a salt must not be empty"),
    ],
)
def test_wrong_parameters(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParamsError) as caught:
        BeamSearchParams(**fields)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_stop_ids_outside_the_vocabulary() -> None:
    params = BeamSearchParams(stop_token_ids=[5])
    params.check_vocab(6)
    with pytest.raises(InvalidParamsError, match=r"BeamSearchParams.stop_token_ids: token id 5 is outside \[0, 5\)"):
        params.check_vocab(5)


def test_a_beam_is_greedy_and_tells_its_candidates() -> None:
    params = BeamSearchParams(beam_width=3, stop_token_ids=[4], ignore_eos=True, cache_salt="a", max_tokens=9)
    assert params.of_a_beam(1) == SamplingParams(
        temperature=0, logprobs=4, stop_token_ids=[4], ignore_eos=True, cache_salt="a", max_tokens=9
    )
