"""Engines that answer the prompt [0] with an exact text, for the cases about text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from e2e.engines import EngineMaker
from isthmus import LLM
from isthmus.testing.scripted import scripted_model, scripted_plugins
from isthmus.testing.tiny_models import tiny_tokenizer

PROMPT = [0]
ScriptedLLM = Callable[[Sequence[str]], LLM]


@pytest.fixture
def scripted(make_llm: EngineMaker, tmp_path: Path) -> ScriptedLLM:
    """scripted(pieces) -> an engine whose answer to PROMPT is those pieces, one token each."""

    def make(pieces: Sequence[str]) -> LLM:
        tokenizer = tiny_tokenizer()
        known = tokenizer.get_vocab()
        tokenizer.add_tokens([piece for piece in dict.fromkeys(pieces) if piece.isascii() and piece not in known])
        script = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
        folder = tmp_path / f"script-{len(list(tmp_path.iterdir()))}"
        model = scripted_model(folder, tokenizer, [token_id for ids in script for token_id in ids])
        return make_llm(model, block_size=4, num_blocks=32, plugins=scripted_plugins())

    return make
