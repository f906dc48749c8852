"""Several completions of one prompt become one output."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.engine.sample_group import SampleGroup, child_id
from isthmus.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput

PROMPT = [1, 2, 3]


def child(
    index: int,
    token_ids: Sequence[int],
    reason: FinishReason | None = None,
    *,
    metrics: RequestMetrics | None = None,
    num_cached_tokens: int = 0,
) -> RequestOutput:
    """What the output processor says of one child: it knows no siblings, so its completion has index 0."""
    return RequestOutput(
        request_id=child_id("r", index),
        prompt="text",
        prompt_token_ids=PROMPT,
        outputs=[CompletionOutput(index=0, text="x" * len(token_ids), token_ids=list(token_ids), finish_reason=reason)],
        finished=reason is not None,
        num_cached_tokens=num_cached_tokens,
        metrics=metrics,
    )


def shape(output: RequestOutput | None) -> list[tuple[int, list[int], FinishReason | None]]:
    assert output is not None
    return [(one.index, one.token_ids, one.finish_reason) for one in output.outputs]


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_the_first_child_has_the_id_of_the_request() -> None:
    assert [child_id("r", index) for index in range(3)] == ["r", "r#1", "r#2"]
    assert SampleGroup("r", 3, stream=False).children == ["r", "r#1", "r#2"]


def test_whole_nothing_comes_before_the_last_end() -> None:
    group = SampleGroup("r", 2, stream=False)
    assert group.take(child(1, [7], STOP)) is None
    output = group.take(child(0, [8, 9], LENGTH))
    assert shape(output) == [(0, [8, 9], LENGTH), (1, [7], STOP)]
    assert output is not None
    assert (output.request_id, output.finished, output.prompt_token_ids) == ("r", True, PROMPT)


def test_the_end_of_one_child_is_not_the_end_of_all() -> None:
    """Neither of the first one, nor of the last one, nor of the one that spoke last."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        group = SampleGroup("r", 3, stream=True)
        finished = []
        for index in order:
            output = group.take(child(index, [index], STOP))
            assert output is not None
            finished.append(output.finished)
        assert finished == [False, False, True]


def test_streamed_every_change_shows_all_so_far() -> None:
    group = SampleGroup("r", 2, stream=True)
    assert shape(group.take(child(0, [8]))) == [(0, [8], None), (1, [], None)]
    assert shape(group.take(child(0, [8, 9]))) == [(0, [8, 9], None), (1, [], None)]
    assert shape(group.take(child(1, [7]))) == [(0, [8, 9], None), (1, [7], None)]
    assert shape(group.take(child(1, [7, 6], STOP))) == [(0, [8, 9], None), (1, [7, 6], STOP)]
    last = group.take(child(0, [8, 9, 5], LENGTH))
    assert shape(last) == [(0, [8, 9, 5], LENGTH), (1, [7, 6], STOP)]
    assert last is not None
    assert last.finished


def test_a_follower_may_speak_first() -> None:
    """The leader was aborted before its first token, say; the request's id is the group's all the same."""
    group = SampleGroup("r", 2, stream=True)
    output = group.take(child(1, [7]))
    assert shape(output) == [(0, [], None), (1, [7], None)]
    assert output is not None
    assert output.request_id == "r"


def test_what_concerns_the_prompt_is_the_first_ones() -> None:
    """Followers begin with the leader's blocks, which is no hit of the prefix cache."""
    group = SampleGroup("r", 2, stream=False)
    group.take(child(1, [7], STOP, num_cached_tokens=3))
    output = group.take(child(0, [8], STOP, num_cached_tokens=0))
    assert output is not None
    assert output.num_cached_tokens == 0


def test_times_run_from_the_first_arrival_to_the_last_end() -> None:
    group = SampleGroup("r", 2, stream=True)
    first = group.take(child(1, [], metrics=RequestMetrics(arrival_s=2.0, first_token_s=None, finished_s=None)))
    assert first is not None
    assert first.metrics == RequestMetrics(arrival_s=2.0, first_token_s=None, finished_s=None)
    early = group.take(child(1, [7], STOP, metrics=RequestMetrics(arrival_s=2.0, first_token_s=5.0, finished_s=6.0)))
    assert early is not None
    assert early.metrics == RequestMetrics(arrival_s=2.0, first_token_s=5.0, finished_s=None)
    last = group.take(child(0, [8], STOP, metrics=RequestMetrics(arrival_s=1.0, first_token_s=4.0, finished_s=5.5)))
    assert last is not None
    assert last.metrics == RequestMetrics(arrival_s=1.0, first_token_s=4.0, finished_s=6.0)


def test_without_times_there_are_none() -> None:
    group = SampleGroup("r", 1, stream=False)
    output = group.take(child(0, [7], STOP))
    assert output is not None
    assert output.metrics is None
