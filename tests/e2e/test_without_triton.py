"""Triton is optional: without it everything but its kernels works, and what is missing is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.testing.tiny_models import tiny_model

HIDE = """
import sys
from importlib.machinery import PathFinder

class WithoutTriton(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTriton
"""
PROGRAM = """
import json, logging
import isthmus
from isthmus.ops.registry import KernelRegistry
from isthmus.ops.triton import register_kernels
from isthmus.plugins.manager import PluginManager

messages = []
class Handler(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())
logging.getLogger("isthmus").addHandler(Handler())

registry = KernelRegistry()
register_kernels(registry, "sm_90")
reasons = {report.name: report.reason for report in PluginManager.load().probe_all()}
llm = isthmus.LLM(sys.argv[1], device="cpu", dtype="float32", num_blocks=8)
greedy = isthmus.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
(output,) = llm.generate([[5, 6, 7]], greedy, progress=False)
print(json.dumps({
    "messages": messages,
    "attention": list(registry.attention_backends()),
    "reasons": reasons,
    "num_tokens": len(output.outputs[0].token_ids),
    "imported": "triton" in sys.modules,
}))
"""
MISSING = "the package triton is not installed; pip install triton"


@pytest.fixture(scope="module")
def without_triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a process says that has everything but Triton."""
    model: Path = tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")
    done = subprocess.run(
        [sys.executable, "-c", HIDE + PROGRAM, str(model)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_engine_runs_on_the_cpu(without_triton: dict[str, object]) -> None:
    assert (without_triton["num_tokens"], without_triton["imported"]) == (4, False)


def test_kernels_are_not_registered_and_the_log_says_why(without_triton: dict[str, object]) -> None:
    assert without_triton["attention"] == []
    assert f"no Triton kernels: {MISSING}" in without_triton["messages"]  # type: ignore[operator]


@pytest.mark.parametrize("platform", ["cuda_interpret", "rocm_interpret"])
def test_interpreted_platforms_say_what_they_lack(without_triton: dict[str, object], platform: str) -> None:
    assert without_triton["reasons"][platform] == MISSING  # type: ignore[index]
