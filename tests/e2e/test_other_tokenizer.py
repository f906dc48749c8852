"""model.tokenizer: another tokenizer than the checkpoint's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus import LLM
from isthmus.errors import CheckpointError
from isthmus.testing.tiny_models import tiny_model, tiny_tokenizer


def test_another_tokenizer_is_used_or_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "model")
    other = tiny_tokenizer()
    other.chat_template = "{{ messages[0]['content'] }}!"
    other.save_pretrained(tmp_path / "other")
    llm = LLM(str(model), device="null", tokenizer=str(tmp_path / "other"))
    assert llm.tokenizer.chat_template == other.chat_template
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: no usable tokenizer"):
        LLM(str(model), device="null", tokenizer=str(tmp_path / "empty"))
