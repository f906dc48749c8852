"""The platform as its users meet it: what the conformance kit certifies, and the tokens of a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from isthmus import LLM, SamplingParams
from isthmus.testing.tiny_models import PROMPTS, tiny_model

ISTHMUS = Path(sys.executable).with_name("isthmus")


def tokens(model: Path, device: str) -> list[list[int]]:
    """Greedy tokens of several prompts at once, in small chunks."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(model), device=device, dtype="float32", max_num_batched_tokens=16, max_num_seqs=4) as llm:
        outputs = llm.generate(list(PROMPTS), params, progress=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "model")
    assert tokens(model, "toy") == tokens(model, "cpu")


def test_the_kit_certifies_it(tmp_path: Path) -> None:
    command = [str(ISTHMUS), "platforms", "certify", "toy", "--require", "correct", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "conformance-toy.json").read_text())
    assert report["level"] in ("correct", "full")
