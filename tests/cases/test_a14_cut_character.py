"""A14: an output that ends inside a character keeps all complete ones; a cut one is one U+FFFD at the very end."""

from __future__ import annotations

import pytest

from cases.scripts import PROMPT, ScriptedLLM, scripted
from e2e.engines import greedy, run

__all__ = ["scripted"]

TEXTS = {
    "mixed": "a👋é中",
    "arabic": "مرحبا",
    "family": "👨‍👩‍👧",
    "tail": "né!中?",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_every_cut(text: str, scripted: ScriptedLLM) -> None:
    llm = scripted(list(text))
    encoded = text.encode()
    for count in range(1, len(encoded) + 1):
        whole = encoded[:count].decode(errors="ignore")
        is_cut = len(whole.encode()) < count
        for streamed in (False, True):
            output = run(llm, PROMPT, greedy(count), streamed=streamed).outputs[0]
            assert len(output.token_ids) == count
            assert output.text == whole + "\ufffd" * is_cut


def test_nothing_uncertain_is_shown_early(scripted: ScriptedLLM) -> None:
    text = TEXTS["mixed"]
    llm = scripted(list(text))
    *earlier, last = [output.outputs[0].text for output in llm.stream(PROMPT, greedy(10))]
    assert last == text
    assert earlier == [text.encode()[:count].decode(errors="ignore") for count in range(1, 10)]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_stop_token_inside_a_character(streamed: bool, scripted: ScriptedLLM) -> None:
    """The last byte is the stop token, whose text is not shown."""
    llm = scripted(["a", "👋"])
    last = llm.tokenizer.encode("👋", add_special_tokens=False)[-1]
    output = run(llm, PROMPT, greedy(5, stop_token_ids=[last]), streamed=streamed).outputs[0]
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("a\ufffd", "stop", 5)
