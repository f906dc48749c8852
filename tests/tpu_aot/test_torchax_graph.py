"""A model through torchax on JAX's CPU, its steps as programs with donated caches, against the same on torch's CPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torchax

from isthmus.checkpoints.open import open_checkpoint
from isthmus.layers.env import AttentionGroups, ModelEnv
from isthmus.models.base import CausalLM
from isthmus.models.loader import load_model
from isthmus.models.spec import ModelSpec
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import AttentionBackend, AttentionBatch, BatchShape
from isthmus.platforms.native_attention import NativeAttentionBackend
from isthmus.testing.tiny_models import greedy_gaps, tiny_model
from isthmus_tpu.ladder import Ladder
from isthmus_tpu.torchax_attention import InterpretedPallasBackend
from isthmus_tpu.torchax_graph import TorchaxGraphBackend
from isthmus_tpu.torchax_loading import WEIGHTS_AS_ARGUMENTS
from tpu_aot.contexts import make_context

BLOCK_SIZE = 8
BLOCKS_PER_REQUEST = 8
CPU = torch.device("cpu")
PROMPTS = ((1, 17, 200, 33, 5, 91, 140, 77, 12, 3), (1, 250, 9), (1, 60, 61, 62, 63, 64, 65, 66))
NUM_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Model:
    """A tiny model and what runs it: `forward` and `logits` as the engine would call them."""

    model: CausalLM
    attention: AttentionGroups
    caches: tuple[tuple[torch.Tensor, ...], ...]

    @classmethod
    def load(cls, path: Path, backend: type[AttentionBackend]) -> Model:
        checkpoint = open_checkpoint(str(path))
        registry = KernelRegistry()
        register_native(registry)
        attention = AttentionGroups(lambda spec: backend(spec, CPU))
        env = ModelEnv(registry.bind_ops({}), attention, torch.float32, torch.float32, BLOCK_SIZE)
        model = load_model(checkpoint, ModelSpec.from_hf(checkpoint.config()), env, CPU)
        backends = [attention.backends[group] for group in attention.layer_groups]
        layouts = [backend.kv_cache_layout(1 + len(PROMPTS) * BLOCKS_PER_REQUEST) for backend in backends]
        caches = tuple(
            tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in layout.tensors) for layout in layouts
        )
        return cls(model, attention, caches)

    def on_jax(self) -> Model:
        """Weights and caches on JAX's device; the weights are packed, as the engine does."""
        with torchax.default_env(), torch.no_grad():
            self.model.to("jax")
            self.model.pack()
        return Model(self.model, self.attention, torchax.default_env().to_xla(self.caches))

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden[rows])


@dataclass(frozen=True, slots=True)
class Runner:
    """Three requests, step by step, padded as the graph policy wants it."""

    model: Model
    forward: Any
    logits: Any
    pad: Any

    def step(self, new: Sequence[Sequence[int]], computed: Sequence[int]) -> list[int]:
        """The next token of each request, after it has been given its `new` ones."""
        lens = [len(tokens) for tokens in new]
        shape = self.pad(BatchShape(sum(lens), len(new), max(lens)))
        tokens, positions, slots = (np.full(shape.num_tokens, fill, np.int64) for fill in (0, 0, -1))
        table = np.zeros((shape.num_reqs, BLOCKS_PER_REQUEST), np.int32)
        starts = np.full(shape.num_reqs + 1, sum(lens), np.int32)
        starts[: len(new)] = np.cumsum([0, *lens[:-1]])
        seq_lens = np.zeros(shape.num_reqs, np.int32)
        for req, (given, done) in enumerate(zip(new, computed, strict=True)):
            where, at = slice(starts[req], starts[req] + len(given)), np.arange(done, done + len(given))
            table[req] = np.arange(1, 1 + BLOCKS_PER_REQUEST) + req * BLOCKS_PER_REQUEST
            tokens[where], positions[where] = given, at
            slots[where] = table[req, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            seq_lens[req] = done + len(given)
        batch = AttentionBatch(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            block_table=torch.from_numpy(table),
            slot_mapping=torch.from_numpy(slots),
            num_reqs=shape.num_reqs,
            num_tokens=sum(lens),
            max_query_len=shape.max_query_len,
            max_seq_len=int(seq_lens.max()),
            query_start_loc_np=starts,
            seq_lens_np=seq_lens,
        )
        metadata = tuple(backend.build_metadata(batch) for backend in self.model.attention.backends)
        context = make_context(self.model.caches, metadata)
        with torch.no_grad():
            hidden = self.forward(torch.from_numpy(tokens), torch.from_numpy(positions), context)
            logits = self.logits(hidden, torch.from_numpy(starts[1 : len(new) + 1].astype(np.int64)) - 1)
        return np.asarray(logits.jax() if hasattr(logits, "jax") else logits).argmax(-1).tolist()

    def generate(self, num_tokens: int) -> list[list[int]]:
        """Greedy continuations; the first prompt comes in two chunks, the second of them beside the others' decodes."""
        known = [list(prompt) for prompt in PROMPTS]
        first = self.step([known[0][:6], *known[1:]], [0] * len(known))
        computed = [6, *map(len, known[1:])]
        for tokens, token in zip(known[1:], first[1:], strict=True):
            tokens.append(token)
        while len(known[0]) < len(PROMPTS[0]) + num_tokens:
            found = self.step([tokens[done:] for tokens, done in zip(known, computed, strict=True)], computed)
            computed = [len(tokens) for tokens in known]
            for tokens, token in zip(known, found, strict=True):
                tokens.append(token)
        return [tokens[len(prompt) :][:num_tokens] for tokens, prompt in zip(known, PROMPTS, strict=True)]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gemma3: windows, norms on q and k, gelu, scaled embeddings."""
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def on_jax(path: Path) -> tuple[Runner, TorchaxGraphBackend]:
    graph = TorchaxGraphBackend(Ladder.of(max_num_batched_tokens=32, max_num_seqs=4))
    model = Model.load(path, InterpretedPallasBackend).on_jax()
    runner = Runner(model, graph.wrap(model.model.forward), graph.wrap_logits(model.compute_logits), graph.pad)
    return runner, graph


def pointers(model: Model) -> list[int]:
    return [tensor.jax().unsafe_buffer_pointer() for layer in model.caches for tensor in layer]


def test_tokens_caches_and_programs(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same tokens as torch's CPU and as transformers, in place, with one program a shape."""
    native = Model.load(checkpoint, NativeAttentionBackend)
    want = Runner(native, native.model.forward, native.compute_logits, lambda shape: shape).generate(NUM_TOKENS)
    assert want[0] == greedy_gaps(checkpoint, PROMPTS[0], NUM_TOKENS)[0]

    runner, graph = on_jax(checkpoint)
    before = pointers(runner.model)
    assert runner.generate(NUM_TOKENS) == want
    assert pointers(runner.model) == before
    made = graph.counters()["compilations"]
    assert made == 6, "steps of 32, 16 and 4 tokens, and logits of as many hidden states"

    graph.warmed_up()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert runner.generate(NUM_TOKENS) == want, "what the first run left in the caches is not seen"
        assert graph.counters() == {"compilations": made, "late_compilations": 0}
        assert caplog.text == ""
        runner.step([PROMPTS[1][:1]], [0])
    assert graph.counters()["late_compilations"] > 0
    assert "made a program of a step" in caplog.text


def test_weights_are_arguments_of_programs_and_not_part_of_them() -> None:
    weight = jax.numpy.asarray(np.random.default_rng(0).standard_normal((128, 128), np.float32))
    text = jax.jit(lambda x: x @ weight).lower(weight[:4]).as_text()
    assert len(text) < weight.nbytes


def test_a_jax_that_copies_weights_into_programs_is_refused() -> None:
    """In a process of its own: JAX reads the option once."""
    code = (
        "import jax, pytest\n"
        "from isthmus_tpu.torchax_loading import load_torchax\n"
        "load_torchax()\n"
        "from isthmus.errors import PlatformError\n"
        "from isthmus_tpu.ladder import Ladder\n"
        "from isthmus_tpu.torchax_graph import TorchaxGraphBackend\n"
        "with pytest.raises(PlatformError, match='was not set when jax was imported'):\n"
        "    TorchaxGraphBackend(Ladder.of(4, 4))\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != WEIGHTS_AS_ARGUMENTS}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
