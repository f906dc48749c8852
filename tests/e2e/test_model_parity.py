"""Every model family against transformers, driven through paged caches as the engine does it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration
from transformers.models.gemma3 import Gemma3Config

from isthmus.checkpoints.directory import DirectoryCheckpoint
from isthmus.layers.env import AttentionGroups, ForwardContext, ModelEnv
from isthmus.models.loader import load_model
from isthmus.models.spec import ModelSpec
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import AttentionBatch, BatchShape, GraphSupport
from isthmus.platforms.native_attention import NativeAttentionBackend
from isthmus.testing.tiny_models import FAMILIES, PROMPTS, greedy_gaps, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
MAX_LEN = 512
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SLIDING_TOP = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-linear": ("llama", rope(rope_type="linear", factor=3.0)),
    "llama-rope-llama3": ("llama", rope(**LLAMA3, original_max_position_embeddings=64)),
    "llama-rope-yarn": ("llama", rope(**YARN)),
    "llama-rope-yarn-mscale": ("llama", rope(**YARN, mscale=0.7, mscale_all_dim=0.4, truncate=False, beta_fast=16)),
    "llama-rope-dynamic": ("llama", rope(rope_type="dynamic", factor=2.0)),
    "llama-rope-longrope": (
        "llama",
        {
            "max_position_embeddings": 4 * MAX_LEN,
            **rope(
                rope_type="longrope",
                factor=4.0,
                original_max_position_embeddings=MAX_LEN,
                short_factor=[1.0 + 0.25 * i for i in range(8)],
                long_factor=[8.0] * 8,
            ),
        },
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-tied-window": ("qwen2", {"tie_word_embeddings": True, **SLIDING_TOP}),
    "qwen3-bias-window": ("qwen3", {"attention_bias": True, **SLIDING_TOP}),
    "gemma3-tied": ("gemma3", {"tie_word_embeddings": True, "query_pre_attn_scalar": 48}),
    # The root of 96, the factor on the embedding, is not exact in bfloat16.
    "gemma3-odd-scale": ("gemma3", {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "gemma3-deep": ("gemma3", {"num_hidden_layers": 7, "layer_types": None}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, dtype) -> folder of its checkpoint, written once. Weights so small that rounding stays well below 1e-4."""

    @cache
    def make(case: str, dtype: torch.dtype = torch.float32) -> Path:
        family, overrides = CASES[case]
        path = tmp_path_factory.mktemp(case)
        return tiny_model(family, path, init_std=0.2, max_len=MAX_LEN, dtype=dtype, **overrides)

    return make


class PagedRunner:
    """The least that can run a model: caches, block tables in random order, one ragged step at a time."""

    def __init__(
        self, path: Path, *, block_size: int, dtype: torch.dtype = torch.float32, num_blocks: int = 80
    ) -> None:
        kernels = KernelRegistry()
        register_native(kernels)
        groups = AttentionGroups(lambda spec: NativeAttentionBackend(spec, CPU))
        env = ModelEnv(
            ops=kernels.bind_ops({}), attention=groups, dtype=dtype, kv_cache_dtype=dtype, block_size=block_size
        )
        source = DirectoryCheckpoint(path)
        self.model: Any = load_model(source, ModelSpec.from_hf(source.config(), max_model_len=MAX_LEN), env, CPU)
        self._groups = groups
        self._block_size = block_size
        layouts = [groups.backends[group].kv_cache_layout(num_blocks) for group in groups.layer_groups]
        self._caches = tuple(tuple(torch.zeros(t.shape, dtype=t.dtype) for t in each.tensors) for each in layouts)
        self._free = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)
        self._tables: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, chunks: dict[str, Sequence[int]], *, padding: int = 0) -> dict[str, torch.Tensor]:
        """Run the next tokens of some requests together; request -> logits [len(tokens), V] of them."""
        input_ids = torch.tensor([t for tokens in chunks.values() for t in tokens] + [0] * padding)
        positions: list[int] = []
        slots: list[int] = []
        for request, tokens in chunks.items():
            start = self._computed.get(request, 0)
            end = self._computed[request] = start + len(tokens)
            table = self._tables.setdefault(request, [])
            while len(table) * self._block_size < end:
                table.append(self._free.pop())
            positions += range(start, end)
            slots += [table[p // self._block_size] * self._block_size + p % self._block_size for p in range(start, end)]
        batch = self._batch(chunks, slots + [-1] * padding)
        metadata = tuple(backend.build_metadata(batch) for backend in self._groups.backends)
        shape = BatchShape(len(input_ids), batch.num_reqs, batch.max_query_len)
        ctx = ForwardContext(self._caches, metadata, shape, GraphSupport.NEVER)
        hidden = self.model(input_ids, torch.tensor(positions + [0] * padding), ctx)
        lengths = [len(tokens) for tokens in chunks.values()]
        logits = self.model.compute_logits(hidden[: sum(lengths)])
        return dict(zip(chunks, logits.float().split(lengths), strict=True))

    def _batch(self, chunks: dict[str, Sequence[int]], slots: list[int]) -> AttentionBatch:
        lengths = [len(tokens) for tokens in chunks.values()]
        query_start_loc = np.cumsum([0, *lengths], dtype=np.int32)
        seq_lens = np.array([self._computed[request] for request in chunks], dtype=np.int32)
        width = max(len(self._tables[request]) for request in chunks)
        tables = [self._tables[request] + [0] * (width - len(self._tables[request])) for request in chunks]
        return AttentionBatch(
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens),
            block_table=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            num_reqs=len(chunks),
            num_tokens=len(slots),
            max_query_len=max(lengths),
            max_seq_len=int(seq_lens.max()),
            query_start_loc_np=query_start_loc,
            seq_lens_np=seq_lens,
        )


def random_tokens(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 384), k=length)


@torch.inference_mode()
def hf_logits(path: Path, *sequences: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return [model(torch.tensor([tokens])).logits[0].float() for tokens in sequences]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_whole_prompt(case: str, checkpoint: Any) -> None:
    tokens = random_tokens(100, seed=1)
    ours = PagedRunner(checkpoint(case), block_size=16).step({"a": tokens})["a"]
    assert_close(ours, hf_logits(checkpoint(case), tokens)[0])


@pytest.mark.parametrize("case", CASES)
def test_chunks_of_seven(case: str, checkpoint: Any) -> None:
    tokens = random_tokens(50, seed=2)
    runner = PagedRunner(checkpoint(case), block_size=16)
    ours = [runner.step({"a": tokens[at : at + 7]})["a"] for at in range(0, 50, 7)]
    assert_close(torch.cat(ours), hf_logits(checkpoint(case), tokens)[0])


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("case", CASES)
def test_mixed_batches(case: str, block_size: int, checkpoint: Any) -> None:
    """Four requests: prefills, chunks and decodes in one step, in changing company, some steps padded."""
    lengths = dict(a=37, b=9, c=64, d=3)
    tokens = {name: random_tokens(length, seed) for seed, (name, length) in enumerate(lengths.items())}
    plan = [dict(a=20), dict(a=1, b=8), dict(c=33, a=7, b=1), dict(a=1, c=1, d=3), dict(a=1, c=15), dict(a=7, c=15)]
    runner = PagedRunner(checkpoint(case), block_size=block_size)
    done = dict.fromkeys(tokens, 0)
    ours: dict[str, list[torch.Tensor]] = {name: [] for name in tokens}
    for number, counts in enumerate(plan):
        chunks = {name: tokens[name][done[name] : done[name] + count] for name, count in counts.items()}
        for name, logits in runner.step(chunks, padding=3 * (number % 2)).items():
            ours[name].append(logits)
            done[name] += counts[name]
    assert done == lengths
    for name, theirs in zip(tokens, hf_logits(checkpoint(case), *tokens.values()), strict=True):
        assert_close(torch.cat(ours[name]), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family: str, tmp_path: Path) -> None:
    """All prompts decode together; tokens equal transformers', each prompt alone. The seeds keep their promise."""
    runner = PagedRunner(tiny_model(family, tmp_path), block_size=16)
    prompts = {prompt: list(tiny_tokenizer()(prompt).input_ids) for prompt in PROMPTS}
    produced: dict[str, list[int]] = {prompt: [] for prompt in PROMPTS}
    chunks: dict[str, Sequence[int]] = dict(prompts)
    for _ in range(16):
        for prompt, logits in runner.step(chunks).items():
            produced[prompt].append(int(logits[-1].argmax()))
        chunks = {prompt: token_ids[-1:] for prompt, token_ids in produced.items()}
    for prompt, token_ids in prompts.items():
        expected, gaps = greedy_gaps(tmp_path, token_ids, num_tokens=16)
        assert len(set(expected)) >= 12
        assert min(gaps) >= 0.1
        assert tiny_tokenizer().eos_token_id not in expected
        assert produced[prompt] == expected


@pytest.mark.parametrize("case", [*FAMILIES, "llama-biases", "llama-rope-yarn", "gemma3-tied", "gemma3-odd-scale"])
def test_bfloat16_rounds_as_transformers(case: str, checkpoint: Any) -> None:
    """Both round at the same places, so they agree far better with each other than with float32."""
    tokens = random_tokens(60, seed=3)
    path = checkpoint(case, torch.bfloat16)
    ours = PagedRunner(path, block_size=16, dtype=torch.bfloat16).step({"a": tokens})["a"]
    theirs = hf_logits(path, tokens, dtype=torch.bfloat16)[0]
    exact = hf_logits(path, tokens)[0]
    rounding = (theirs - exact).abs().mean()
    assert (ours - theirs).abs().mean() <= 0.2 * rounding


@pytest.mark.parametrize("saved_as", ["model.language_model.", "language_model.model."])
def test_language_model_of_a_multimodal_checkpoint(saved_as: str, tmp_path: Path) -> None:
    """Both layouts of the names that such checkpoints have had."""
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16, "sliding_window_pattern": 2}
    config = Gemma3Config(
        text_config={**text, "max_position_embeddings": MAX_LEN},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        image_token_index=383,
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    tokens = random_tokens(40, seed=4)
    tokens = [token % 383 for token in tokens]
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    model.save_pretrained(tmp_path)
    _rename(tmp_path / "model.safetensors", saved_as)
    ours = PagedRunner(tmp_path, block_size=16).step({"a": tokens})["a"]
    assert_close(ours, theirs)


def _rename(weights: Path, prefix: str) -> None:
    from safetensors.torch import load_file, save_file

    renamed = {}
    for name, tensor in load_file(weights).items():
        bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        if name.startswith(("model.language_model.", "language_model.")):
            renamed[prefix + bare] = tensor
        else:
            renamed[name if prefix.startswith("model.") else bare] = tensor
    save_file(renamed, weights, metadata={"format": "pt"})
