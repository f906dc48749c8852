"""What LLM is built from: another tokenizer than the checkpoint's own, a whole EngineConfig."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus import LLM
from isthmus.config import from_kwargs
from isthmus.errors import CheckpointError, ConfigError
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


def test_a_whole_config_stands_in_for_the_name_and_takes_nothing_beside_it(tmp_path: Path) -> None:
    config = from_kwargs(tiny_model("llama", tmp_path / "model"), device="null", max_model_len=64)
    assert LLM(config).config.model.max_model_len == 64
    with pytest.raises(ConfigError, match=r"device, seed: given beside a whole EngineConfig; put it into that"):
        LLM(config, seed=1, device="cpu")
