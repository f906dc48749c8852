"""A20: every end-of-sequence id that the checkpoint's files declare ends the text, as one id or as a list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, greedy, run, token_ids
from isthmus.testing.tiny_models import PROMPTS, VOCAB_SIZE

PROMPT = PROMPTS[0]
FILES = ("generation_config.json", "config.json")
FORMS = ("list", "int")


def declare(model: Path, copy: Path, file: str, eos: Any) -> Path:
    """A copy of the model that has `eos` in `file`; config.json is only read where the other file is absent."""
    shutil.copytree(model, copy)
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps({**content, "eos_token_id": eos}))
    if file == "config.json":
        (copy / "generation_config.json").unlink()
    return copy


@pytest.fixture
def unstopped(make_llm: EngineMaker, tiny_llama: Path) -> list[int]:
    """t, of which t[5] occurs first at 5."""
    found = token_ids(make_llm(tiny_llama).generate([PROMPT], greedy(20))[0])
    assert found[5] not in found[:5]
    return found


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", FILES)
def test_declared_ids_stop(
    file: str, form: str, streamed: bool, unstopped: list[int], make_llm: EngineMaker, tiny_llama: Path, tmp_path: Path
) -> None:
    eos: Any = unstopped[5]
    if form == "list":
        eos = [make_llm(tiny_llama).tokenizer.eos_token_id, eos]
    llm = make_llm(declare(tiny_llama, tmp_path / "model", file, eos))
    output = run(llm, PROMPT, greedy(20, ignore_eos=False), streamed=streamed).outputs[0]
    assert output.token_ids == unstopped[:6]
    assert output.text == llm.tokenizer.decode(unstopped[:5])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


@pytest.mark.parametrize("file", FILES)
def test_ignore_eos_ignores_all_of_them(
    file: str, unstopped: list[int], make_llm: EngineMaker, tiny_llama: Path, tmp_path: Path
) -> None:
    llm = make_llm(declare(tiny_llama, tmp_path / "model", file, unstopped[5:8]))
    assert token_ids(run(llm, PROMPT, greedy(20), streamed=False)) == unstopped


def test_min_tokens_holds_back_all_of_them(
    unstopped: list[int], make_llm: EngineMaker, tiny_llama: Path, tmp_path: Path
) -> None:
    llm = make_llm(declare(tiny_llama, tmp_path / "model", FILES[0], unstopped[5:8]))
    output = run(llm, PROMPT, greedy(20, ignore_eos=False, min_tokens=10), streamed=False)
    assert not set(token_ids(output)[:10]) & set(unstopped[5:8])


@pytest.mark.parametrize("form", FORMS)
def test_tokenizers_own_id_stops_beside_the_declared_ones(
    form: str, make_llm: EngineMaker, tiny_llama: Path, tmp_path: Path
) -> None:
    other: Any = VOCAB_SIZE - 1 if form == "int" else [VOCAB_SIZE - 1, VOCAB_SIZE - 2]
    llm = make_llm(declare(tiny_llama, tmp_path / "model", FILES[0], other))
    eos = llm.tokenizer.eos_token_id
    output = run(llm, PROMPT, greedy(20, ignore_eos=False, logit_bias={eos: 100}), streamed=False).outputs[0]
    assert (output.token_ids, output.finish_reason) == ([eos], "stop")


def test_requests_side_by_side(unstopped: list[int], make_llm: EngineMaker, tiny_llama: Path, tmp_path: Path) -> None:
    llm = make_llm(declare(tiny_llama, tmp_path / "model", FILES[0], [unstopped[5]]))
    stopping, ignoring = llm.generate([PROMPT] * 2, [greedy(20, ignore_eos=False), greedy(20)])
    assert (token_ids(stopping), token_ids(ignoring)) == (unstopped[:6], unstopped)
