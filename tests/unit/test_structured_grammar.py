"""Compiled grammars: the masks against a search of the vocabulary, ends, limits, the cache."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from isthmus import StructuredOutput
from isthmus.errors import InvalidGrammarError, QueueFullError
from isthmus.structured import compiler as compiler_module
from isthmus.structured.compiler import MAX_CACHED, MAX_PENDING, GrammarCompiler
from isthmus.structured.grammar import MAX_TOKEN_S, Grammar, GrammarState
from isthmus.structured.tokenizer import TokenizerText
from isthmus.testing.tiny_models import tiny_tokenizer

EOS = 1
VOCAB_SIZE = 384
LOGITS = VOCAB_SIZE + 32
"""Of a model whose head is wider than its vocabulary."""


def make_compiler(**settings: Any) -> GrammarCompiler:
    return GrammarCompiler(lambda: TokenizerText.of(tiny_tokenizer(), [EOS]), LOGITS, **settings)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


@pytest.fixture(scope="module")
def compile_(compiler: GrammarCompiler) -> Callable[..., Grammar]:
    return lambda **fields: compiler.submit(StructuredOutput(**fields)).wait()


@cache
def token_texts() -> dict[int, str]:
    """Of the tokens that are whole characters and not special."""
    tokenizer = tiny_tokenizer()
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(3, VOCAB_SIZE)}
    return {token_id: text for token_id, text in texts.items() if "�" not in text}


def encode(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer().encode(text, add_special_tokens=False)
    return ids


def allowed(state: GrammarState, *, may_end: bool = True) -> set[int]:
    words = state.mask(may_end=may_end)
    assert words is not None
    assert words.dtype == np.int32
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def after(grammar: Grammar, text: str) -> GrammarState:
    state = grammar.begin()
    ids = [99, 98, *encode(text)]
    state.accept(ids, 2)
    assert state.error is None
    return state


CHOICES = ["yes", "yesterday", "no", "the sea", 'a "quoted" \\ one', "two\nlines", "é😀", "/x{1}/"]


def test_a_mask_is_what_a_search_of_the_vocabulary_finds(compile_: Callable[..., Grammar]) -> None:
    grammar = compile_(choice=CHOICES)
    for choice in CHOICES:
        ids = encode(choice)
        for count in range(len(ids)):
            so_far = tiny_tokenizer().decode(ids[:count])
            if "�" in so_far:
                continue
            state = grammar.begin()
            state.accept(ids[:count], 0)
            rest = [text[len(so_far) :] for text in CHOICES if text.startswith(so_far)]
            expected = {
                token_id for token_id, text in token_texts().items() if any(each.startswith(text) for each in rest)
            }
            found = allowed(state)
            if len({text[:1] for text in rest}) == 1:  # where there is no choice, it takes the usual tokens
                assert found
                assert found & token_texts().keys() <= expected
            else:
                assert found & token_texts().keys() == expected
            assert (EOS in found) == (so_far in CHOICES)


def test_it_ends_where_nothing_may_follow(compile_: Callable[..., Grammar]) -> None:
    grammar = compile_(choice=CHOICES)
    assert after(grammar, "no").is_complete
    assert after(grammar, "yesterday").is_complete
    assert after(grammar, "no").mask(may_end=True) is None
    assert after(grammar, "no").error is None
    state = after(grammar, "yes")
    assert not state.is_complete
    assert EOS in allowed(state)
    assert allowed(state, may_end=False) == allowed(state) - {EOS}


def test_a_grammar_of_the_empty_text_is_complete_at_once(compile_: Callable[..., Grammar]) -> None:
    state = compile_(regex="a{0}").begin()
    assert state.mask(may_end=True) is None
    assert state.error is None


def test_the_state_follows_from_the_output(compile_: Callable[..., Grammar]) -> None:
    """Token by token, all at once, or told of some again: the same."""
    grammar = compile_(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    ids = [5, 6, *encode('{"a": 12')]
    one, other, again = grammar.begin(), grammar.begin(), grammar.begin()
    for count in range(2, len(ids) + 1):
        one.accept(ids[:count], 2)
    other.accept(ids, 2)
    again.accept(ids[:4], 2)
    again.accept(ids, 2)
    again.accept(ids, 2)
    assert allowed(one) == allowed(other) == allowed(again)
    assert not allowed(one) & set(range(VOCAB_SIZE, LOGITS))


def test_a_token_that_is_not_allowed_is_an_error_of_this_state_only(compile_: Callable[..., Grammar]) -> None:
    grammar = compile_(choice=["yes", "no"])
    state = grammar.begin()
    state.accept(encode("x"), 0)
    assert state.error is not None
    assert not state.is_complete
    assert state.mask(may_end=True) is None
    assert after(grammar, "no").is_complete


TEXTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "recursive schema": (
        {
            "json": {
                "$ref": "#/$defs/node",
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                        "required": ["next"],
                        "additionalProperties": False,
                    }
                },
            }
        },
        '{"next": {"next": null}}',
        '{"next": {"next": 1',
    ),
    "one of": (
        {"json": {"oneOf": [{"const": 1}, {"const": "b"}]}},
        '"b"',
        '"c',
    ),
    "any object": ({"json_object": True}, '{"a": [1, {}]}', "["),
    "compact": ({"json": {"type": "array", "items": {"const": 1}}, "disable_any_whitespace": True}, "[1,1]", "[1, "),
    "own blanks": ({"json": {"const": [1, 1]}, "whitespace_pattern": "~"}, "[1,~1]", "[1, "),
    "blanks": ({"json": {"const": [1, 1]}}, "[1," + " " * 32 + "1]", "[1," + " " * 33),
    "lark": ({"grammar": 'start: "a" b+\nb: /[0-9]/ ";"'}, "a1;2;", "a1b"),
    "gbnf": ({"grammar": 'root ::= "a" item+ "."\nitem ::= [0-9]{2} ";"  # a comment'}, "a12;34;.", "a1;"),
    "gbnf escapes": (
        {"grammar": r'root ::= "\u0022" [\u0041-\u0043\u00e9]+ "\\u0041" "\U0001f600."'},
        '"ABé\\u0041😀.',
        '"D',
    ),
}


@pytest.mark.parametrize(("fields", "right", "wrong"), TEXTS.values(), ids=TEXTS.keys())
def test_texts(fields: dict[str, Any], right: str, wrong: str, compile_: Callable[..., Grammar]) -> None:
    grammar = compile_(**fields)
    state = after(grammar, right)
    assert state.is_complete or EOS in allowed(state)
    state = grammar.begin()
    state.accept(encode(wrong), 0)
    assert state.error is not None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a schema that is a string": ({"json": {"properties": {"foo": "bar"}}}, "must be an object or boolean"),
    "an unknown type": ({"json": {"type": "nosuch"}}, "nosuch"),
    "a keyword that cannot be enforced": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "a reference to nothing": ({"json": {"$ref": "#/$defs/a"}}, "does not exist"),
    "a reference to elsewhere": ({"json": {"$ref": "http://example.com/a.json"}}, "does not fetch"),
    "a schema of itself": ({"json": {"$ref": "#"}}, "cannot be compiled"),
    "contradiction": ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, "cannot be compiled"),
    "an open group": ({"regex": "("}, "unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-ahead"),
    "an undefined rule": ({"grammar": "root ::= nope"}, "nope"),
    "an undefined rule in lark": ({"grammar": "start: nope"}, "nope"),
    "no root": ({"grammar": 'a ::= "x"'}, "root"),
    "no grammar": ({"grammar": "?"}, "write rules"),
    "an open escape": ({"grammar": 'root ::= "\\'}, "write rules"),
    "deep groups": ({"grammar": "root ::= " + "(" * 5000 + '"x"' + ")" * 5000}, "write rules"),
    "deep groups in lark": ({"grammar": "start: " + "(" * 5000 + '"x"' + ")" * 5000}, "nested"),
    "deep regex": ({"regex": "(" * 5000 + "x" + ")" * 5000}, "cannot be compiled"),
    "deep schema": ({"json": '{"items":' * 400 + "{}" + "}" * 400}, "recursion limit"),
    "doubling terminals": (
        {"grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "x"'},
        "too big",
    ),
    "intersected patterns": (
        {"json": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(3, 12)]}},
        "cannot be compiled",
    ),
    "a multiple of a prime": ({"json": {"type": "integer", "multipleOf": 999_999_937}}, "fuel"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_compiled_is_refused(
    fields: dict[str, Any], message: str, compile_: Callable[..., Grammar]
) -> None:
    with pytest.raises(InvalidGrammarError) as error:
        compile_(**fields)
    assert str(error.value).startswith("StructuredOutput.")
    assert message in str(error.value)
    assert len(str(error.value)) < 1000


def chain_of_schemas(count: int) -> dict[str, Any]:
    link = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$defs": {**link, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def test_a_chain_as_long_as_fits_does_not_overflow_the_stack(compile_: Callable[..., Grammar]) -> None:
    """On the usual stack of a thread it ends the process."""
    deep = after(compile_(json=chain_of_schemas(2300)), '{"a": ' * 20)
    assert allowed(deep)
    compile_(
        json={
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3500)} | {"d3500": True},
            "$ref": "#/$defs/d0",
        }
    )
    compile_(grammar="start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(1800)) + 'r1800: "x"')


def test_a_grammar_that_takes_too_long_for_a_token_ends_its_request(
    compile_: Callable[..., Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ambiguous one: what a token costs grows with the square of their number. The clock is made up."""
    grammar = compile_(grammar='start: a\na: a a | "a" | "aa" | "b"')
    ids = encode("a") * 3
    slow, quick = grammar.begin(), grammar.begin()
    assert slow.mask(may_end=True) is not None
    now = itertools.count(step=MAX_TOKEN_S * 0.6)
    monkeypatch.setattr("isthmus.structured.grammar.time.thread_time", lambda: next(now))
    quick.accept(ids, 0)  # several at once may take several times as long
    assert quick.mask(may_end=True) is not None
    slow.accept(ids[:1], 0)
    assert slow.error is None
    assert slow.mask(may_end=True) is None
    assert slow.error == "it takes more than 0.1 s to find out what may follow"
    assert not slow.is_complete


def test_a_row_of_too_many_alternatives_ends_its_request(compile_: Callable[..., Grammar]) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {f"p{index}": {} for index in range(2000)}}
    assert allowed(after(compile_(json=schema), "{"))
    schema["properties"].update({f"p{index}": {} for index in range(2000, 2600)})
    state = compile_(json=schema).begin()
    state.accept(encode("{"), 0)
    assert state.mask(may_end=True) is None
    assert "Current row has" in (state.error or "")


# The compiler.


def test_each_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StructuredOutput] = []

    def counted(spec: StructuredOutput, tokenizer: Any) -> Grammar:
        made.append(spec)
        return Grammar(spec, tokenizer)

    monkeypatch.setattr(compiler_module, "Grammar", counted)
    compiler = make_compiler()
    specs = [StructuredOutput(choice=["a", "b"]), StructuredOutput(regex="("), StructuredOutput(choice=["a", "b"])]
    first, wrong, same = [compiler.submit(spec) for spec in specs]
    assert first.wait() is same.wait()
    for _ in range(2):
        with pytest.raises(InvalidGrammarError):
            wrong.wait()
        wrong = compiler.submit(specs[1])
    assert sorted(made, key=repr) == sorted(specs[:2], key=repr)


class Gate:
    """A `Grammar` that takes until `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.num_begun = 0

    def __call__(self, spec: StructuredOutput, tokenizer: Any) -> str:
        self.num_begun += 1
        assert self.open.wait(30)
        return f"grammar of {spec.regex}"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(compiler_module, "Grammar", made)
    yield made
    made.open.set()


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_who_waits_too_long_is_refused_and_the_grammar_is_there_when_it_is_done(gate: Gate) -> None:
    compiler = make_compiler(timeout_s=0.05)
    spec = StructuredOutput(regex="a")
    late = compiler.submit(spec)
    with pytest.raises(InvalidGrammarError, match="could not be compiled in time"):
        late.wait()
    gate.open.set()
    wait_until(lambda: late._future.done())
    assert compiler.submit(spec).poll() == "grammar of a"
    assert gate.num_begun == 1


def test_the_tokenizer_does_not_count(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()

    def load() -> TokenizerText:
        assert slow.wait(30)
        return TokenizerText.of(tiny_tokenizer(), [EOS])

    gate.open.set()
    compiler = GrammarCompiler(load, LOGITS, timeout_s=0.01)
    compilation = compiler.submit(StructuredOutput(regex="a"))
    time.sleep(0.05)
    assert compilation.poll() is None
    slow.set()
    assert compilation.wait() == "grammar of a"


def test_few_are_compiled_at_once_and_not_many_may_wait(gate: Gate) -> None:
    compiler = make_compiler()
    for index in range(MAX_PENDING):
        compiler.submit(StructuredOutput(regex=f"a{index}"))
    wait_until(lambda: gate.num_begun == compiler_module.NUM_AT_ONCE)
    with pytest.raises(QueueFullError, match="64 grammars are being compiled; try again in"):
        compiler.submit(StructuredOutput(regex="b"))
    assert compiler.submit(StructuredOutput(regex="a0")).poll() is None
    assert gate.num_begun == compiler_module.NUM_AT_ONCE
    gate.open.set()
    wait_until(lambda: gate.num_begun == MAX_PENDING)


def test_no_thread_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compiler = make_compiler()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(QueueFullError, match="can't start new thread"):
            compiler.submit(StructuredOutput(choice=["no"]))
    assert threading.stack_size() == 0
    assert after(compiler.submit(StructuredOutput(choice=["no"])).wait(), "no").is_complete


def test_the_least_recently_used_is_forgotten(gate: Gate) -> None:
    gate.open.set()
    compiler = make_compiler()
    for index in range(MAX_CACHED):
        compiler.submit(StructuredOutput(regex=f"a{index}")).wait()
    compiler.submit(StructuredOutput(regex="a0")).wait()
    compiler.submit(StructuredOutput(regex="new")).wait()
    assert gate.num_begun == MAX_CACHED + 1
    compiler.submit(StructuredOutput(regex="a0")).wait()
    assert gate.num_begun == MAX_CACHED + 1
    compiler.submit(StructuredOutput(regex="a1")).wait()
    assert gate.num_begun == MAX_CACHED + 2


def test_a_failure_that_nobody_foresaw_fails_the_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's panics are no Exceptions."""

    def panic(spec: StructuredOutput, tokenizer: Any) -> Grammar:
        raise SystemExit("panic")

    monkeypatch.setattr(compiler_module, "Grammar", panic)
    with pytest.raises(InvalidGrammarError, match="cannot be compiled: SystemExit: panic"):
        make_compiler().submit(StructuredOutput(regex="a")).wait()


def test_a_model_without_an_end_goes_on_while_the_grammar_does() -> None:
    compiler = GrammarCompiler(lambda: TokenizerText.of(tiny_tokenizer(), []), LOGITS)
    grammar = compiler.submit(StructuredOutput(regex="(ab)+|c")).wait()
    state = after(grammar, "ab")
    found = allowed(state, may_end=False)
    assert {token_texts()[token_id] for token_id in found} <= {"a", "ab", "aba", "abab"}
    assert found
    assert after(grammar, "c").is_complete


def test_grammars_of_the_tokenizer_match_what_it_writes(compile_: Callable[..., Grammar]) -> None:
    """A walk along allowed tokens only ever writes what the regex allows."""
    pattern = r"[a-f]{2,4}(-[0-9]{1,3})?"
    grammar = compile_(regex=pattern)
    generator = np.random.default_rng(0)
    for _ in range(30):
        state, ids = grammar.begin(), list[int]()
        while (words := state.mask(may_end=True)) is not None:
            bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            token = int(generator.choice(bits))
            if token == EOS:
                break
            ids.append(token)
            state.accept(ids, 0)
        assert re.fullmatch(pattern, tiny_tokenizer().decode(ids))


def test_a_tokenizer_that_was_offered_is_not_loaded_again() -> None:
    def load() -> TokenizerText:
        raise AssertionError("loaded")

    compiler = GrammarCompiler(load, LOGITS)
    compiler.offer(TokenizerText.of(tiny_tokenizer(), [EOS, 999]))
    assert after(compiler.submit(StructuredOutput(choice=["no"])).wait(), "no").is_complete


def test_a_tokenizer_without_its_text_is_refused() -> None:
    with pytest.raises(InvalidGrammarError, match="this model's tokenizer cannot be used for it: a str has no"):
        TokenizerText.of("slow", [])  # type: ignore[arg-type]
    broken = GrammarCompiler(lambda: TokenizerText("{}", 5, ()), LOGITS)
    with pytest.raises(InvalidGrammarError, match="this model's tokenizer cannot be used for it"):
        broken.submit(StructuredOutput(regex="a")).wait()
