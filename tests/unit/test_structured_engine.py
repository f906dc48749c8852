"""Requests with a grammar in the engine core: who waits for what, and how they end. The grammars are made up."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from isthmus import SamplingParams, StructuredOutput
from isthmus.engine.core import EngineCore
from isthmus.engine.loop import EngineLoop, Inbox
from isthmus.engine.messages import (
    Abort,
    Accepted,
    Add,
    Call,
    FromEngine,
    FromFrontend,
    OfferTokenizer,
    Outputs,
    Refused,
    Shutdown,
    encoder,
    from_frontend,
)
from isthmus.engine.request_data import pack
from isthmus.errors import InvalidGrammarError, InvalidParamsError, QueueFullError
from isthmus.outputs import FinishReason
from isthmus.scheduler.output import RequestDelta
from isthmus.scheduler.request import Request
from isthmus.structured.compiler import Compilation
from isthmus.structured.tokenizer import TokenizerText
from unit.test_engine_core import assert_empty, either, expected, make, request

SPEC = StructuredOutput(regex="made up")


class MadeUpState:
    """Ends after `length` tokens. Remembers what it was told, and fails if it had to guess."""

    def __init__(self, length: int, error_at: int | None) -> None:
        self.length, self.error_at = length, error_at
        self.taken: list[int] = []
        self.masked_at: list[int] = []

    def accept(self, token_ids: Sequence[int], start: int) -> None:
        self.taken += token_ids[start + len(self.taken) :]

    @property
    def is_complete(self) -> bool:
        return len(self.taken) >= self.length

    @property
    def error(self) -> str | None:
        return "too much" if self.error_at is not None and len(self.taken) >= self.error_at else None

    def mask(self, *, may_end: bool) -> np.ndarray | None:
        self.masked_at.append(len(self.taken))
        return None if self.is_complete or self.error else np.full(1, -1, np.int32)


class MadeUpGrammar:
    def __init__(self, length: int, error_at: int | None = None) -> None:
        self.length, self.error_at = length, error_at
        self.states: list[MadeUpState] = []

    def begin(self) -> Any:
        self.states.append(MadeUpState(self.length, self.error_at))
        return self.states[-1]


class MadeUpCompiler:
    """Gives what `done` holds, or a future that the test settles."""

    def __init__(self) -> None:
        self.futures: dict[StructuredOutput, Future[Any]] = {}
        self.seconds_left = 10.0
        self.is_full = False

    def submit(self, spec: StructuredOutput) -> Compilation:
        if self.is_full:
            raise QueueFullError("full of grammars", retry_after_s=1.0)
        return Compilation(self.futures.setdefault(spec, Future()), lambda submitted_s: self.seconds_left)


def structured(name: str, **settings: Any) -> Request:
    return request(name, **{"structured": SPEC, **settings})


def run(core: EngineCore) -> dict[str, list[RequestDelta]]:
    found: dict[str, list[RequestDelta]] = {}
    while core.has_unfinished or core._ended:
        for delta in core.step():
            found.setdefault(delta.request_id, []).append(delta)
        core.scheduler.check_integrity()
    return found


def tokens(deltas: Sequence[RequestDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.new_token_ids]


@either
def test_a_grammar_is_asked_once_for_each_token_with_all_of_the_output_known(ahead: bool) -> None:
    core, executor = make(ahead=ahead)
    grammar: Any = MadeUpGrammar(length=5)
    one, plain = structured("a", max_tokens=9), request("b", max_tokens=9)
    core.add_requests([one], grammar)
    core.add_requests([plain])
    found = run(core)
    [state] = grammar.states
    assert tokens(found["a"]) == expected(one, 5) == state.taken
    assert found["a"][-1].finish_reason is FinishReason.STOP
    assert state.masked_at == [0, 1, 2, 3, 4]
    assert tokens(found["b"]) == expected(plain, 9)
    for output in executor.outputs:
        assert set(output.token_masks) <= {"a"} & set(output.num_scheduled_tokens)
    assert sum(len(output.token_masks) for output in executor.outputs) == 5
    assert_empty(core, executor)
    assert core.scheduler.structured == {}


def test_ahead_the_others_go_on_in_every_step() -> None:
    core, executor = make(ahead=True)
    core.add_requests([structured("a", max_tokens=6)], MadeUpGrammar(length=99))  # type: ignore[arg-type]
    core.add_requests([request("b", max_tokens=12)])
    run(core)
    with_a = [index for index, output in enumerate(executor.outputs) if "a" in output.num_scheduled_tokens]
    with_b = [index for index, output in enumerate(executor.outputs) if "b" in output.num_scheduled_tokens]
    assert with_b == list(range(with_b[0], with_b[0] + 12))
    assert with_a == list(range(with_a[0], with_a[0] + 12, 2))


@either
def test_parts_of_a_prompt_have_no_mask(ahead: bool) -> None:
    core, executor = make(ahead=ahead, max_num_batched_tokens=4, long_prefill_token_threshold=3)
    grammar: Any = MadeUpGrammar(length=2)
    core.add_requests([structured("a", length=10, max_tokens=9)], grammar)
    run(core)
    assert [bool(output.token_masks) for output in executor.outputs if output.num_scheduled_tokens] == [
        False,
        False,
        False,
        True,
        True,
    ]


@either
def test_preemption_loses_nothing(ahead: bool) -> None:
    core, _ = make(ahead=ahead, scheduler__artificial_preemption_rate=0.5)
    grammar: Any = MadeUpGrammar(length=8)
    ones = [structured(name, max_tokens=9) for name in "abc"]
    for one in ones:
        core.add_requests([one], grammar)
    found = run(core)
    assert core.scheduler.stats.num_preemptions > 0
    for one, state in zip(ones, grammar.states, strict=True):
        assert tokens(found[one.request_id]) == expected(one, 8) == state.taken


@either
def test_an_output_that_is_complete_before_a_step_ends_without_it(ahead: bool) -> None:
    core, executor = make(ahead=ahead)
    core.add_requests([structured("a")], MadeUpGrammar(length=0))  # type: ignore[arg-type]
    core.add_requests([request("b")])
    found = run(core)
    [last] = found["a"]
    assert (last.new_token_ids, last.finish_reason, last.stop_reason) == ([], FinishReason.STOP, None)
    assert len(tokens(found["b"])) == 5
    assert_empty(core, executor)


@either
def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(ahead: bool) -> None:
    core, executor = make(ahead=ahead)
    one, other = structured("a", max_tokens=9), structured("b", max_tokens=9)
    core.add_requests([one], MadeUpGrammar(length=9, error_at=3))  # type: ignore[arg-type]
    core.add_requests([other], MadeUpGrammar(length=7))  # type: ignore[arg-type]
    found = run(core)
    assert tokens(found["a"]) == expected(one, 3)
    assert found["a"][-1].finish_reason is FinishReason.ERROR
    assert found["a"][-1].stop_reason == (
        "the output cannot be continued as SamplingParams.structured asks for: too much; make the grammar simpler"
    )
    assert tokens(found["b"]) == expected(other, 7)
    assert_empty(core, executor)


@either
def test_completions_of_one_prompt_have_a_state_each(ahead: bool) -> None:
    core, _ = make(ahead=ahead)
    grammar: Any = MadeUpGrammar(length=4)
    leader = structured("a", max_tokens=9, n=2)
    follower = leader.sibling("a1", 7)
    core.add_requests([leader, follower], grammar)
    found = run(core)
    assert [state.taken for state in grammar.states] == [tokens(found["a"]), tokens(found["a1"])]
    assert tokens(found["a"]) == expected(leader, 4)
    assert tokens(found["a1"]) == expected(follower, 4)


def test_an_aborted_request_leaves_no_state() -> None:
    core, executor = make(ahead=False)
    core.add_requests([structured("a", max_tokens=9)], MadeUpGrammar(length=9))  # type: ignore[arg-type]
    core.step()
    core.abort_requests(["a"])
    assert core.scheduler.structured == {}
    assert_empty(core, executor)


def test_the_beginning_is_found_again_after_a_failed_step() -> None:
    """A state is not behind its output when that is computed again by another Request."""
    from isthmus.engine.rewind import put_back, take_all

    core, _ = make(ahead=True)
    grammar: Any = MadeUpGrammar(length=6)
    one = structured("a", max_tokens=9)
    core.add_requests([one], grammar)
    for _ in range(4):
        core.step()
    core._give_up_steps()
    for again in take_all(core.scheduler):
        put_back(core.scheduler, again)
    assert core.scheduler.structured.keys() == {"a"}
    known = list(grammar.states[0].taken)
    found = run(core)
    assert known
    assert known + tokens(found["a"]) == expected(one, 6)


def test_an_engine_without_a_compiler_refuses() -> None:
    core, _ = make(ahead=False)
    with pytest.raises(InvalidGrammarError, match="compiles no grammars"):
        core.check_request(structured("a"))
    with pytest.raises(InvalidGrammarError, match="compiles no grammars"):
        core.add_requests([structured("a")])


# The loop.


class Script(Inbox):
    """Gives one batch of messages at each look, then Shutdown when nothing is left to do."""

    def __init__(self) -> None:
        self.batches: deque[list[Any]] = deque()
        self.patience: list[float | None] = []

    def take(self, timeout_s: float | None) -> Sequence[FromFrontend]:
        self.patience.append(timeout_s)
        batch = self.batches.popleft() if self.batches else [Shutdown()]
        for act in batch:
            if callable(act):
                act()
        return [message for message in batch if not callable(message)]


def looped(compiler: MadeUpCompiler, *batches: Sequence[Any]) -> tuple[list[FromEngine], Script]:
    """What the engine says to these messages. A function among them is called before the rest is read."""
    core, _ = make(ahead=False)
    core._compiler = compiler  # type: ignore[assignment]
    said: list[FromEngine] = []
    inbox = Script()
    inbox.batches.extend(list(batch) for batch in batches)
    EngineLoop(core, inbox, said.append).run()
    return said, inbox


def answers(said: Sequence[FromEngine]) -> dict[str, int]:
    found: dict[str, int] = {}
    for message in said:
        if isinstance(message, Outputs):
            for delta in message.deltas:
                found[delta.request_id] = found.get(delta.request_id, 0) + len(delta.new_token_ids)
    return found


def accepted(said: Sequence[FromEngine]) -> list[int]:
    return [ticket for message in said if isinstance(message, Accepted) for ticket in message.tickets]


def refused(said: Sequence[FromEngine]) -> dict[int, Exception]:
    return {message.ticket: pickle.loads(message.error) for message in said if isinstance(message, Refused)}


def test_a_request_waits_for_its_grammar_and_nobody_else_does() -> None:
    compiler = MadeUpCompiler()
    said, _ = looped(
        compiler,
        [Add(1, pack([structured("a")])), Add(2, pack([request("b")]))],
        [],
        [],
        [lambda: compiler.futures[SPEC].set_result(MadeUpGrammar(length=3))],
        *[[]] * 6,
    )
    assert accepted(said) == [2, 1]
    assert answers(said) == {"a": 3, "b": 5}


def test_an_idle_engine_looks_again_soon_but_does_not_spin() -> None:
    compiler = MadeUpCompiler()
    _, inbox = looped(compiler, [Add(1, pack([structured("a")]))], [], [Call(1, "pause")], [])
    assert inbox.patience == [None, 0.002, 0.002, 0.002, 0.002]


def test_a_grammar_that_cannot_be_compiled_refuses_the_request() -> None:
    compiler = MadeUpCompiler()
    wrong = InvalidGrammarError("StructuredOutput.regex: cannot be compiled: because")
    said, inbox = looped(
        compiler,
        [Add(1, pack([structured("a")])), Add(2, pack([request("b")]))],
        [lambda: compiler.futures[SPEC].set_exception(wrong)],
        *[[]] * 6,
    )
    error = refused(said)[1]
    assert (type(error), str(error)) == (InvalidGrammarError, str(wrong))
    assert accepted(said) == [2]
    assert answers(said) == {"b": 5}
    assert inbox.patience[-1] is None


def test_a_grammar_that_takes_too_long_refuses_the_request() -> None:
    compiler = MadeUpCompiler()

    def late() -> None:
        compiler.seconds_left = 0.0

    said, _ = looped(compiler, [Add(1, pack([structured("a")]))], [], [late], [])
    assert "could not be compiled in time" in str(refused(said)[1])


def test_too_many_grammars_refuse_the_request_until_later() -> None:
    compiler = MadeUpCompiler()
    compiler.is_full = True
    said, _ = looped(compiler, [Add(1, pack([structured("a")]))], [])
    error = refused(said)[1]
    assert isinstance(error, QueueFullError)
    assert error.retry_after_s == 1.0


def test_who_is_aborted_meanwhile_is_forgotten_and_its_id_is_free() -> None:
    compiler = MadeUpCompiler()
    leader = structured("a", n=2)
    said, _ = looped(
        compiler,
        [Add(1, pack([leader, leader.sibling("a1", 9)]))],
        [Abort(["a", "a1"])],
        [Add(2, pack([structured("a")]))],
        [lambda: compiler.futures[SPEC].set_result(MadeUpGrammar(length=3))],
        *[[]] * 4,
    )
    assert isinstance(refused(said)[1], InvalidParamsError)
    assert accepted(said) == [2]
    assert answers(said) == {"a": 3}


def test_a_live_id_is_refused_when_its_grammar_is_there() -> None:
    compiler = MadeUpCompiler()
    said, _ = looped(
        compiler,
        [Add(1, pack([structured("a")])), Add(2, pack([structured("a")]))],
        [lambda: compiler.futures[SPEC].set_result(MadeUpGrammar(length=3))],
        *[[]] * 4,
    )
    assert accepted(said) == [1]
    assert "already live" in str(refused(said)[2])
    assert answers(said) == {"a": 3}


def test_a_tokenizer_that_is_offered_reaches_the_compiler() -> None:
    offered: list[Any] = []
    compiler = MadeUpCompiler()
    compiler.offer = offered.append  # type: ignore[attr-defined]
    text = TokenizerText("{}", 5, (1, 2))
    written = encoder().encode(OfferTokenizer(text))
    looped(compiler, [from_frontend().decode(written)], [])
    assert offered == [text]


def test_params_without_a_grammar_need_no_compiler() -> None:
    core, _ = make(ahead=False)
    core.check_request(Request("a", [1], SamplingParams(max_tokens=1)))
