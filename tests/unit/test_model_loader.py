"""Loading: every parameter filled, every tensor used, errors that name the tensor; and the arithmetic of sharding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.checkpoints.base import Checkpoint
from isthmus.errors import CheckpointError, UnsupportedModelError
from isthmus.layers.embedding import VocabEmbedding
from isthmus.layers.env import AttentionGroups, ForwardContext, ModelEnv, ParallelGroup
from isthmus.layers.linear import ColumnLinear, RowLinear
from isthmus.layers.param import kv_shards
from isthmus.layers.rotary import RopeSpec, cos_sin_table
from isthmus.models.loader import build_model, init_dummy, load_model
from isthmus.models.registry import ModelRegistry
from isthmus.models.spec import ModelSpec
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BatchShape,
    GraphSupport,
    KVCacheLayout,
    LinearBackend,
    LinearSpec,
    SingleCommunicator,
)
from isthmus.platforms.facts import DeviceInfo
from isthmus.platforms.linear import NativeLinearBackend

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}
FIRST_Q = "model.layers.0.self_attn.q_proj.weight"


class DictCheckpoint(Checkpoint):
    """A checkpoint in memory; a list of pairs may hold a name twice."""

    def __init__(self, tensors: dict[str, torch.Tensor] | list[tuple[str, torch.Tensor]]) -> None:
        self.path = Path("memory")
        self._tensors = list(tensors.items()) if isinstance(tensors, dict) else tensors

    def config(self) -> dict[str, Any]:
        return CONFIG

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer(self) -> Any:
        raise NotImplementedError

    def tensor_names(self) -> list[str]:
        return [name for name, _ in self._tensors]

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors:
            yield name, tensor.to(dtype)


class SelfAttendingBackend(AttentionBackend):
    """Every token sees itself only, so no cache is needed and a head's output is its kv head's value."""

    name = "self"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        return KVCacheLayout(())

    def build_metadata(self, batch: AttentionBatch) -> None:
        return None

    def forward(self, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        return v.repeat_interleave(group, dim=1) + q * k.repeat_interleave(group, dim=1)


class ThreadCommunicator(SingleCommunicator):
    """The ranks of one group as threads: each puts its tensor down, waits for the others, reads them all."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[torch.Tensor | None]) -> None:
        self._rank, self._barrier, self._table = rank, barrier, table

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._table[self._rank] = x.clone()
        self._barrier.wait(timeout=20)
        parts = [part for part in self._table if part is not None]
        self._barrier.wait(timeout=20)
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=dim)


def make_env(tp: ParallelGroup | None = None, dtype: torch.dtype = torch.float32) -> ModelEnv:
    kernels = KernelRegistry()
    register_native(kernels)
    groups = AttentionGroups(lambda spec: SelfAttendingBackend(spec, CPU))
    return ModelEnv(kernels.bind_ops({}), groups, dtype, dtype, block_size=16, tp=tp or ParallelGroup())


def checkpoint_tensors(**overrides: Any) -> dict[str, torch.Tensor]:
    """Random weights under the names and shapes of transformers' own class."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {k: v for k, v in {**CONFIG, **overrides}.items() if k not in ("architectures", "model_type")}
    with torch.device("meta"):
        state = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    generator = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(meta.shape, generator=generator) for name, meta in state.items()}


def load(tensors: dict[str, torch.Tensor] | list[tuple[str, torch.Tensor]], **overrides: Any) -> Any:
    return load_model(DictCheckpoint(tensors), ModelSpec.from_hf({**CONFIG, **overrides}), make_env(), CPU)


def run(model: Any, num_tokens: int = 5) -> torch.Tensor:
    input_ids = torch.arange(num_tokens) * 7 % 50
    layers = len(model.model.layers)
    shape = BatchShape(num_tokens, 1, num_tokens)
    ctx = ForwardContext(((),) * layers, (None,), shape, GraphSupport.NEVER)
    with torch.inference_mode():
        logits: torch.Tensor = model.compute_logits(model(input_ids, torch.arange(num_tokens), ctx))
    return logits


def run_ranks(size: int, work: Callable[[ParallelGroup], Any]) -> list[Any]:
    """`work` once per rank, in step; results in rank order."""
    barrier, table = threading.Barrier(size), [None] * size
    groups = [ParallelGroup(rank, size, ThreadCommunicator(rank, barrier, table)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, groups))


def test_fused_parameters_hold_their_parts_in_order() -> None:
    tensors = checkpoint_tensors()
    model = load(tensors)
    layer = model.model.layers[1]
    prefix = "model.layers.1."
    for kind in ("weight", "bias"):
        qkv = [tensors[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"]
        assert torch.equal(getattr(layer.self_attn.qkv_proj, kind), torch.cat(qkv))
        gate_up = [tensors[f"{prefix}mlp.{part}_proj.{kind}"] for part in ("gate", "up")]
        assert torch.equal(getattr(layer.mlp.gate_up_proj, kind), torch.cat(gate_up))
        assert torch.equal(getattr(layer.mlp.down_proj, kind), tensors[f"{prefix}mlp.down_proj.{kind}"])


def test_the_whole_model_is_on_the_device_asked_for() -> None:
    model = load(checkpoint_tensors())
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {CPU}
    meta = build_model(ModelSpec.from_hf(CONFIG), make_env(), torch.device("meta"))
    assert {tensor.device.type for tensor in (*meta.parameters(), *meta.buffers())} == {"meta"}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_missing_tensor() -> None:
    tensors = checkpoint_tensors()
    del tensors[FIRST_Q]
    with pytest.raises(CheckpointError) as error:
        load(tensors)
    assert str(error.value) == f"no tensor for {FIRST_Q!r} of LlamaForCausalLM; the checkpoint is incomplete"


def test_left_over_tensor() -> None:
    with pytest.raises(CheckpointError) as error:
        load({**checkpoint_tensors(), "model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)})
    assert str(error.value) == (
        "tensor 'model.layers.2.mlp.up_proj.weight' has no place in LlamaForCausalLM; the checkpoint is of another "
        "model, or a setting that this weight belongs to is not implemented"
    )


@pytest.mark.parametrize(
    "fused", ["model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"]
)
def test_our_own_fused_names_are_not_checkpoint_names(fused: str) -> None:
    with pytest.raises(CheckpointError, match=f"^tensor '{fused}' has no place in"):
        load({**checkpoint_tensors(), fused: torch.zeros(64, 32)})


def test_wrong_shape() -> None:
    with pytest.raises(CheckpointError) as error:
        load({**checkpoint_tensors(), FIRST_Q: torch.zeros(32, 16)})
    assert str(error.value) == (
        f"tensor {FIRST_Q!r} has shape [32, 16], the model needs [32, 32]; config and weights do not belong together"
    )


def test_a_tensor_given_twice() -> None:
    tensors = checkpoint_tensors()
    with pytest.raises(CheckpointError) as error:
        load([*tensors.items(), (FIRST_Q, tensors[FIRST_Q])])
    assert str(error.value) == f"tensor {FIRST_Q!r} fills a place that is already filled; remove the duplicate"


def test_harmless_extras() -> None:
    tensors = checkpoint_tensors()
    reference = run(load(tensors))
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert torch.equal(run(load({**tensors, **extras})), reference)


def test_tied_head() -> None:
    tensors = checkpoint_tensors()
    embedding = tensors["model.embed_tokens.weight"]
    duplicate = {**tensors, "lm_head.weight": embedding}
    without = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    reference = run(load(duplicate))
    assert torch.equal(run(load(duplicate, tie_word_embeddings=True)), reference)
    assert torch.equal(run(load(without, tie_word_embeddings=True)), reference)
    assert not torch.equal(run(load(tensors)), reference)
    with pytest.raises(CheckpointError, match=r"^no tensor for 'lm_head\.weight' of LlamaForCausalLM"):
        load(without)


def test_dummy_weights_depend_on_the_seed_only() -> None:
    spec = ModelSpec.from_hf(CONFIG)

    def dummy(seed: int) -> torch.Tensor:
        model = build_model(spec, make_env(), CPU)
        init_dummy(model, seed)
        return run(model)

    assert torch.equal(dummy(0), dummy(0))
    assert not torch.equal(dummy(0), dummy(1))
    assert dummy(0).isfinite().all()


def test_a_registry_of_ones_own() -> None:
    registry = ModelRegistry()
    registry.register("TwinForCausalLM", "isthmus.models.llama:LlamaForCausalLM")
    spec = ModelSpec.from_hf({**CONFIG, "architectures": ["TwinForCausalLM"]})
    tensors = checkpoint_tensors()
    assert torch.equal(run(load_model(DictCheckpoint(tensors), spec, make_env(), CPU, registry)), run(load(tensors)))
    with pytest.raises(UnsupportedModelError, match=r"^architecture 'TwinForCausalLM' is not supported"):
        load_model(DictCheckpoint(tensors), spec, make_env(), CPU)


def test_layers_of_one_spec_share_a_group_and_a_rope_table() -> None:
    model = load(checkpoint_tensors())
    first, second = (layer.self_attn for layer in model.model.layers)
    assert (first.attention.layer, second.attention.layer) == (0, 1)
    assert first.attention.group == second.attention.group == 0
    assert first.rotary is second.rotary


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (2, 4), (4, 2), (4, 4), (4, 1)])
def test_sharded_model_equals_whole(size: int, kv_heads: int, tied: bool) -> None:
    """4 ranks over 2 kv heads hold each kv head twice; 50 ids over 4 ranks leave the last one a shorter share."""
    overrides = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    tensors = checkpoint_tensors(**overrides)
    spec = ModelSpec.from_hf({**CONFIG, **overrides})

    def work(tp: ParallelGroup) -> torch.Tensor:
        return run(load_model(DictCheckpoint(tensors), spec, make_env(tp), CPU))

    whole = run(load(tensors, **overrides))
    for logits in run_ranks(size, work):
        torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-5)


def test_column_then_row_over_two_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(6, 4, generator=generator) for _ in range(3))
    down, down_bias, x = (torch.randn(*shape, generator=generator) for shape in ((4, 6), (4,), (3, 4)))

    def work(tp: ParallelGroup) -> tuple[list[int], torch.Tensor]:
        env = make_env(tp)
        column, row = ColumnLinear(4, [6, 6, 6], env), RowLinear(6, 4, env, bias=True)
        column.weight, row.weight, row.bias = column.weight.on(CPU), row.weight.on(CPU), row.bias.on(CPU)
        for slot, tensor in enumerate((a, b, c)):
            column.weight.load("abc"[slot], tensor, slot)
        row.weight.load("down", down)
        row.bias.load("bias", down_bias)
        left, right, last = column(x).split(column.split_sizes, dim=-1)
        return column.split_sizes, row(left * right + last)

    expected = ((x @ a.T) * (x @ b.T) + x @ c.T) @ down.T + down_bias
    for sizes, result in run_ranks(2, work):
        assert sizes == [3, 3, 3]
        torch.testing.assert_close(result, expected)


def test_a_vocabulary_that_does_not_divide() -> None:
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))

    def work(tp: ParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = VocabEmbedding(5, 4, make_env(tp))
        embedding.weight = embedding.weight.on(CPU)
        embedding.weight.data.fill_(torch.nan)
        embedding.weight.load("w", weight)
        return embedding(torch.arange(5)), embedding.logits(weight)

    for rows, logits in run_ranks(4, work):
        assert torch.equal(rows, weight)
        torch.testing.assert_close(logits, weight @ weight.T)


def test_heads_that_do_not_divide_are_refused() -> None:
    assert [kv_shards(heads, size) for heads, size in ((8, 2), (2, 2), (2, 8), (1, 4))] == [2, 2, 2, 1]
    with pytest.raises(UnsupportedModelError) as error:
        build_model(ModelSpec.from_hf(CONFIG), make_env(ParallelGroup(rank=0, size=3)), CPU)
    assert str(error.value) == (
        "num_key_value_heads=2 cannot be split evenly over tp_size=3; choose a tp_size that divides it"
    )


class DoublingBackend(NativeLinearBackend):
    """Keeps the weight transposed, and doubles what it multiplies."""

    name = "doubling"

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight.T.contiguous()

    def apply(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x @ packed if bias is None else x @ packed + bias


def test_a_backend_takes_the_weight_over_after_loading() -> None:
    asked: list[LinearSpec] = []

    def linear(spec: LinearSpec) -> LinearBackend:
        asked.append(spec)
        return DoublingBackend(spec)

    layer = RowLinear(4, 3, replace(make_env(), linear=linear))
    layer.weight = layer.weight.on(CPU)
    weight = torch.arange(12.0).view(3, 4)
    layer.weight.load("w", weight)
    x = torch.arange(8.0).view(2, 4)
    assert torch.equal(layer(x), x @ weight.T)
    layer.pack()
    assert torch.equal(layer(x), 2 * (x @ weight.T))
    assert layer.weight.untyped_storage().nbytes() == 0
    assert asked == [LinearSpec(in_features=4, out_features=3, dtype=torch.float32)]


@pytest.mark.parametrize("tied", [True, False])
def test_packing_a_model_keeps_the_embedding_and_frees_the_rest(tied: bool) -> None:
    spec = ModelSpec.from_hf({**CONFIG, "tie_word_embeddings": tied})
    model = build_model(spec, replace(make_env(), linear=DoublingBackend), CPU)
    init_dummy(model, 0)
    hidden = torch.randn(3, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    before = model.compute_logits(hidden)
    with torch.inference_mode():
        model.pack()
    torch.testing.assert_close(model.compute_logits(hidden), 2 * before)
    kept = {name for name, param in model.named_parameters() if param.dim() == 2 and param.numel()}
    assert kept == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(("rope_type", "limit"), [("dynamic", 64), ("longrope", 32)])
def test_ropes_that_change_with_the_sequence_are_refused_past_their_limit(rope_type: str, limit: int) -> None:
    spec = RopeSpec(rope_type, 1e4, 8, 64, 32, factor=2.0, short_factor=(1.0,) * 4)
    assert cos_sin_table(spec, limit).shape == (limit, 8)
    with pytest.raises(UnsupportedModelError) as error:
        cos_sin_table(spec, limit + 1)
    assert str(error.value) == (
        f"rope_type={rope_type!r} changes its frequencies past {limit} tokens, which a KV cache cannot follow; "
        f"set max_model_len={limit} or less (it is {limit + 1})"
    )
