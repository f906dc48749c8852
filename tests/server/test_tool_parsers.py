"""Every format of tool calls: what models write, and what becomes of it, whatever the pieces in which it comes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cli import serve
from isthmus.server.tool_parsers.base import ToolParser
from isthmus.server.tool_parsers.forced import NamedCall, RequiredCalls
from isthmus.server.tool_parsers.registry import TOOL_PARSERS, evident_tool_parser

TOOLS = ("get_weather", "add", "time")
PARSERS: dict[str, type[ToolParser]] = {**TOOL_PARSERS, "required": RequiredCalls, "named": NamedCall}
Found = tuple[str, list[tuple[str, str]]]
"""Content, and name and arguments of each call."""


def parsed(name: str, pieces: Sequence[str]) -> Found:
    """What the parser makes of the pieces, put together as a client does it."""
    parser = PARSERS[name](TOOLS[:1] if name == "named" else TOOLS)
    content, calls, ids = "", [], set()
    for at, piece in enumerate(pieces):
        part = parser.push(piece, finished=at == len(pieces) - 1)
        content += part.content
        assert len({call.index for call in part.calls}) == len(part.calls)
        for call in part.calls:
            if call.index == len(calls):
                assert call.id is not None
                assert call.name is not None
                ids.add(call.id)
                calls.append((call.name, ""))
            else:
                assert (call.id, call.name) == (None, None)
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    assert len(ids) == len(calls)
    return content, calls


def check(name: str, text: str, expected: Found) -> None:
    """In one piece, and character by character."""
    assert parsed(name, [text]) == expected
    assert parsed(name, [*text, ""]) == expected


PARIS = '{"city": "Paris"}'
NESTED = '{"at": {"lat": 1.5, "tags": ["a", {"b": []}]}, "note": "a } ] { [ \\" \\\\", "n": -1e3, "no": null}'
UNICODE = '{"city": "Zürich ☃ 東京 \\ud83d\\ude00 😀"}'
ARGUMENTS = [PARIS, NESTED, UNICODE, "{}", '{ "a":\n 1 }']


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'),
        ("hermes", '<tool_call>{"arguments": %s, "name": "get_weather"}</tool_call>\n'),
        ("hermes", '<tool_call>{"name":"get_weather","arguments":%s}'),
        ("llama3_json", '{"name": "get_weather", "parameters": %s}'),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": %s}'),
        ("llama3_json", '\n{"name": "get_weather", "parameters": %s};'[:-1]),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": %s}]'),
        ("mistral", '[TOOL_CALLS] [ {"arguments": %s, "name": "get_weather", "id": "abcdefghi"} ]'),
        ("mistral", "[TOOL_CALLS]get_weather%s"),
        ("mistral", "[TOOL_CALLS]get_weather[ARGS]%s"),
        ("required", '[{"name": "get_weather", "arguments": %s}]'),
        ("named", "%s"),
    ],
)
def test_one_call(name: str, form: str, arguments: str) -> None:
    """Arguments are what the model wrote, to the letter."""
    json.loads(arguments)
    check(name, form % arguments, ("", [("get_weather", arguments)]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        ),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}'),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}\n{"name": "time", "parameters": {}}'),
        (
            "mistral",
            '[TOOL_CALLS][{"name":"get_weather","arguments":{"city": "Paris"}},{"name":"time","arguments":{}}]',
        ),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]time{}'),
        ("pythonic", '[get_weather(city="Paris"), time()]'),
        ("pythonic", "<|python_start|>[get_weather(city='Paris'), time(),]<|python_end|>"),
        ("required", '[{"name":"get_weather","arguments":{"city": "Paris"}} , {"name":"time","arguments":{}}]'),
    ],
)
def test_several_calls(name: str, text: str) -> None:
    check(name, text, ("", [("get_weather", PARIS), ("time", "{}")]))


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", f'Let me see.\n\n<tool_call>{{"name": "add", "arguments": {PARIS}}}</tool_call>', "Let me see."),
        ("hermes", f'a <tool_call>{{"name": "add", "arguments": {PARIS}}}</tool_call>\nb ', "a\nb "),
        ("llama3_json", f'I shall.<|python_tag|>{{"name": "add", "parameters": {PARIS}}}', "I shall."),
        ("llama3_json", f'{{"name": "add", "parameters": {PARIS}}} Done.', " Done."),
        ("mistral", f'Let me see. [TOOL_CALLS][{{"name": "add", "arguments": {PARIS}}}] Done', "Let me see. Done"),
        ("mistral", f"Let me see.[TOOL_CALLS]add{PARIS}", "Let me see."),
        ("pythonic", '[add(city="Paris")] Done.', " Done."),
        ("pythonic", 'So: <|python_start|>[add(city="Paris")]<|python_end|>', "So:"),
    ],
)
def test_text_beside_calls(name: str, text: str, content: str) -> None:
    check(name, text, (content, [("add", PARIS)]))


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", {}),
        ("a=1, b=-2.5, c='x', d=\"y\"", {"a": 1, "b": -2.5, "c": "x", "d": "y"}),
        ("a=[1, {'b': (2, 3)}], c=None, d=True", {"a": [1, {"b": [2, 3]}], "c": None, "d": True}),
        ("a=true, b=false, c=null", {"a": True, "b": False, "c": None}),
        ("a='it\\'s ) ] , \"', b='Zürich ☃'", {"a": "it's ) ] , \"", "b": "Zürich ☃"}),
        ("a='''x ' ) y''', b=r'\\d'", {"a": "x ' ) y", "b": "\\d"}),
        ("a='\\d'", {"a": "\\d"}),
        ("a='', b=\"\"", {"a": "", "b": ""}),
    ],
)
def test_python_becomes_json(written: str, arguments: object) -> None:
    content, [(name, text)] = parsed("pythonic", [f"[add({written})]"])
    assert (content, name, json.loads(text)) == ("", "add", arguments)
    check("pythonic", f"[add({written})]", ("", [("add", text)]))


@pytest.mark.parametrize("value", ["1j", "b'x'", "{1, 2}", "{1: 2}", "1e999", "f()", "x", "f'{a}'", "'\\ud800'", "*b"])
def test_python_that_is_no_json(value: str) -> None:
    """It is read, never evaluated."""
    text = f"[add(a={value})]"
    check("pythonic", text, (text, []))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            (name, text)
            for name in TOOL_PARSERS
            for text in ("", "Hello", " \n", "a < b <tool", "[1, 2]", "{}", "[", "{")
        ),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>get_weather</tool_call>"),
        ("hermes", '<tool_call>{"name": get_weather, "arguments": {}}</tool_call> '),
        ("hermes", "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "ad'),
        ("hermes", '<tool_call>\n{"name": "add", "argu'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": '),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": "\\"'),
        ("llama3_json", '{"name": "Alice", "parameters": {}}'),
        ("llama3_json", '{"temperature": 21, "name": "add"}'),
        ("llama3_json", '<|python_tag|>print("hello")'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
        ("llama3_json", 'Say {"name": "add", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS][{"name": "add"'),
        ("mistral", "[TOOL_CALLS]add"),
        ("pythonic", "[other(a=1)]"),
        ("pythonic", "[add]"),
        ("pythonic", "[add(1)]"),
        ("pythonic", "[add(a=1"),
        ("pythonic", "[add(a=')"),
        ("pythonic", "[add(a=1 b=2)]"),
        ("pythonic", "[add(**{'a': 1})]"),
        ("pythonic", "[add(a=" + "(" * 500 + ")" * 500 + ")]"),
        ("pythonic", "Say [add(a=1)]"),
        ("required", '[{"name": "ad'),
        ("required", ""),
        ("named", ""),
        ("named", " "),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    """To the letter: what is malformed, what is cut off before its arguments, and what only looks like a call."""
    check(name, text, (text, []))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x', ("", [("add", '{"a": "x')])),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\', ("", [("add", '{"a": "\\')])),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> ', ("", [("add", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', ("", [("add", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>', ("", [("add", '{"a": oops}')])),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', ("", [("add", "{}")])),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("add", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "new", "arguments": {}}</tool_call>', ("", [("new", "{}")])),
        (
            "hermes",
            '<tool_call>oops</tool_call>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>',
            ("<tool_call>oops</tool_call>", [("add", "{}")]),
        ),
        ("llama3_json", '{"name": "add", "parameters": {"a": [1', ("", [("add", '{"a": [1')])),
        ("llama3_json", '{"name": "add", "parameters": {}}; no', ("; no", [("add", "{}")])),
        ("mistral", "[TOOL_CALLS]add{", ("", [("add", "{")])),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}, oops', (", oops", [("add", "{}")])),
        ("pythonic", "[add(a=1), oops(a=2)]", (", oops(a=2)]", [("add", '{"a": 1}')])),
        ("pythonic", "[add(a=1), time(", (", time(", [("add", '{"a": 1}')])),
        ("required", '[{"name": "add", "arguments": {"a', ("", [("add", '{"a')])),
        ("named", '{"city": "Par', ("", [("get_weather", '{"city": "Par')])),
    ],
)
def test_calls_that_are_not_whole(name: str, text: str, expected: Found) -> None:
    """A call whose arguments have begun is one; what else there is, is content."""
    check(name, text, expected)


def test_arguments_come_as_they_are_written() -> None:
    parser = TOOL_PARSERS["hermes"](TOOLS)
    assert not parser.push('<tool_call>{"name": "add", ', finished=False).calls
    [first] = parser.push('"arguments": {"a', finished=False).calls
    assert (first.name, first.arguments) == ("add", '{"a')
    [more] = parser.push('": 1', finished=False).calls
    assert (more.id, more.name, more.arguments) == (None, None, '": 1')
    assert not parser.push("}</tool_call>", finished=True).content


def test_content_is_not_held_back() -> None:
    parser = TOOL_PARSERS["hermes"](TOOLS)
    found = [parser.push(piece, finished=False).content for piece in ("Hel", "lo ", "<b", "> x", "<tool_", "box")]
    assert found == ["Hel", "lo", " <b", "> x", "", "<tool_box"]


def test_ids_of_mistral_are_what_its_templates_take() -> None:
    parser = TOOL_PARSERS["mistral"](TOOLS)
    calls = parser.push("[TOOL_CALLS]add{}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{}", finished=True).calls
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", call.id or "") for call in calls)
    assert [call.id for call in calls][1:] == ["abcdefghi"]


FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    '{"name": "add", "arguments": ',
    '"name"',
    '"arguments": {',
    '"parameters"',
    '"add"',
    "add",
    "add(",
    "a=",
    "[add(a='",
    "'",
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ":",
    ",",
    ";",
    " ",
    "\n",
    "<",
    "x",
    "é",
    "1",
    "null",
)
PIECES = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=20)


@given(name=st.sampled_from(sorted(PARSERS)), pieces=PIECES, cuts=st.lists(st.integers(0, 400), max_size=30))
def test_pieces_change_nothing(name: str, pieces: list[str], cuts: list[int]) -> None:
    """Every split of every text gives what the whole gives, and what is no call comes back to the letter."""
    text = "".join(pieces)
    whole = parsed(name, [text])
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parsed(name, [text[start:end] for start, end in itertools.pairwise(at)] or [""]) == whole
    assert parsed(name, [*text, ""]) == whole
    if not whole[1]:
        assert whole[0] == text


@given(
    name=st.sampled_from(["hermes", "llama3_json", "mistral", "required"]),
    calls=st.lists(
        st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists)), min_size=1
    ),
    is_ascii=st.booleans(),
)
def test_every_call_is_read_back(name: str, calls: list[dict[str, object]], is_ascii: bool) -> None:
    written = [json.dumps({"name": "add", "arguments": call}, ensure_ascii=is_ascii) for call in calls]
    text = {
        "hermes": "\n".join(f"<tool_call>{each}</tool_call>" for each in written),
        "llama3_json": "; ".join(written),
        "mistral": f"[TOOL_CALLS][{', '.join(written)}]",
        "required": f"[{','.join(written)}]",
    }[name]
    content, found = parsed(name, [*text, ""])
    assert (content, [json.loads(arguments) for _, arguments in found]) == ("", calls)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ('{%- if tools %}<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>', "hermes"),
        ("{% if tools %}<tool_call>\n<function=name>\n<parameter=x>", None),
        ("{% for tool in tools %}<tool_call>{{ n }}<arg_key>", None),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('{% if tools is not none %}in the format {"name": function name, "parameters": dictionary', "llama3_json"),
        ("{% if tools %}in the format [func_name1(params_name1=params_value1...)]", "pythonic"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        ("<tool_call>", None),
    ],
)
def test_the_format_of_a_template(template: str, expected: str | None) -> None:
    assert evident_tool_parser(template) == expected


def test_the_flag_knows_every_format() -> None:
    assert set(serve.TOOL_PARSERS) == set(TOOL_PARSERS)
