"""LLM.chat when the template is missing, or refuses what it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus import LLM, SamplingParams
from isthmus.errors import InvalidPromptError
from isthmus.testing.tiny_models import tiny_model

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}hello"
PARAMS = SamplingParams(temperature=0, max_tokens=2)


def test_a_template_that_refuses_is_a_request_error_and_a_missing_one_says_what_to_do(tmp_path: Path) -> None:
    llm = LLM(str(tiny_model("llama", tmp_path / "model")), device="null")
    talk = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    with pytest.raises(InvalidPromptError, match="the chat template refuses this conversation: no system role"):
        llm.chat(talk, PARAMS, chat_template=NO_SYSTEM, progress=False)
    assert len(llm.chat(talk[1:], PARAMS, chat_template=NO_SYSTEM, progress=False)) == 1
    llm.tokenizer.chat_template = None
    with pytest.raises(InvalidPromptError, match="has no chat template; use generate"):
        llm.chat(talk, PARAMS, progress=False)
