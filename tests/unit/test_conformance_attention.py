"""The kit's areas attention and blocks: they pass backends that are right and catch those that are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from isthmus.conformance import test_attention as attention
from isthmus.conformance import test_blocks as blocks
from isthmus.conformance.attention_cases import SCENARIOS, THIN_VARIANTS, VARIANTS, textbook_cases, thinned
from isthmus.conformance.attention_harness import Play
from isthmus.conformance.target import Target
from isthmus.platforms import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CacheTensor,
    DeviceInfo,
    GraphSupport,
    KVCacheLayout,
)
from isthmus.platforms.attention import KVCache
from isthmus.plugins.manager import PluginManager

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


class LoopBackend(AttentionBackend):
    """Right, slow, and with a method for everything that can be wrong. Cache: [K, num_blocks, block_size, 2 * D]."""

    name: ClassVar[str] = "loop"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        shape = (s.num_kv_heads, num_blocks, s.block_size, 2 * s.head_dim)
        return KVCacheLayout((CacheTensor(shape, s.kv_cache_dtype, block_dim=1),))

    def build_metadata(self, batch: AttentionBatch) -> Any:
        return batch

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Any) -> Any:
        (cache,) = kv_cache
        self.write(cache, k, v, metadata.slot_mapping)
        out = torch.empty_like(q)
        starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for r in range(metadata.num_reqs):
            rows = slice(starts[r], starts[r + 1])
            if rows.start < rows.stop:
                keys, values = self.read(cache, metadata.block_table[r], lens[r])
                out[rows] = self.attend(q[rows], keys, values, lens[r])
        return out

    def write(self, cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        real = slots >= 0
        cache.flatten(1, 2)[:, slots[real]] = torch.cat((k, v), dim=-1)[real].transpose(0, 1)

    def read(self, cache: torch.Tensor, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [len, H, D]."""
        both = cache[:, table.long()].flatten(1, 2)[:, :length].transpose(0, 1)[:, self.kv_heads()]
        return both[..., : self.spec.head_dim], both[..., self.spec.head_dim :]

    def kv_heads(self) -> torch.Tensor:
        return torch.arange(self.spec.num_heads) // (self.spec.num_heads // self.spec.num_kv_heads)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * self.scale()
        scores = self.capped(scores)
        distance = torch.arange(length - len(q), length)[:, None] - torch.arange(len(keys))
        weights = (scores.masked_fill(~self.visible(distance), -torch.inf) - scores.max()).exp()
        return self.weigh(weights, values).to(q.dtype)

    def scale(self) -> float:
        return self.spec.scale

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.spec.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        window = self.spec.sliding_window
        return (distance >= 0) & (distance < (window or torch.inf))

    def weigh(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """weights [H, n, len] before normalisation, values [len, H, D]; [n, H, D]"""
        sums = torch.einsum("hqk,khd->qhd", weights, values.float())
        return sums / weights.sum(-1).T[..., None]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.start("cpu", PluginManager.load())


def play(target: Target, backend: type[AttentionBackend], variant: str, scenario: str, dtype: torch.dtype) -> None:
    one = VARIANTS[variant]
    Play(target, backend, one.spec(dtype), SCENARIOS[scenario](one.block_size)).run()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
@pytest.mark.parametrize("variant", ["base", "window20-softcap"])
def test_a_right_backend_passes(target: Target, variant: str, scenario: str, dtype: torch.dtype) -> None:
    play(target, LoopBackend, variant, scenario, dtype)


class SeesTheNextToken(LoopBackend):
    def read(self, cache: torch.Tensor, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().read(cache, table, length + 1)

    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        return super().visible(distance + 1)


class SeesTheNextOfItsChunk(LoopBackend):
    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        return super().visible(distance + 1)


class SeesNotItself(LoopBackend):
    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        others = super().visible(distance) & (distance != 0)
        return torch.where(others.any(-1, keepdim=True), others, super().visible(distance))


class DropsTheWindow(LoopBackend):
    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        return distance >= 0


class WindowIsOneLonger(LoopBackend):
    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        return (distance >= 0) & (distance <= (self.spec.sliding_window or torch.inf))


class WindowIsOneShorter(LoopBackend):
    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        return (distance >= 0) & (distance < (self.spec.sliding_window or torch.inf) - 1)


class ScaleIsTheUsual(LoopBackend):
    def scale(self) -> float:
        return self.spec.head_dim**-0.5


class ScaleIsATenthMore(LoopBackend):
    def scale(self) -> float:
        return 1.1 * self.spec.scale


class DropsTheSoftCap(LoopBackend):
    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return scores


class TakesKvHeadsInTurn(LoopBackend):
    def kv_heads(self) -> torch.Tensor:
        return torch.arange(self.spec.num_heads) % self.spec.num_kv_heads


class SwapsKeysAndValues(LoopBackend):
    def write(self, cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(cache, v, k, slots)


class KeepsMetadataOfAShape(LoopBackend):
    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        shape = (len(batch.slot_mapping), *batch.block_table.shape)
        return replace(batch, block_table=self._kept.setdefault(shape, batch.block_table.clone()))


class IgnoresHowFarAChunkIs(LoopBackend):
    """Right for whole prompts and for decodes."""

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int) -> torch.Tensor:
        return super().attend(q, keys, values, length if len(q) == 1 else len(q))


class AttendsBeforeTheNextRequestWrites(LoopBackend):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Any) -> Any:
        out, starts = torch.empty_like(q), metadata.query_start_loc.tolist()
        for r in range(metadata.num_reqs):
            rows = slice(starts[r], starts[r + 1])
            self.write(kv_cache[0], k[rows], v[rows], metadata.slot_mapping[rows])
            keys, values = self.read(kv_cache[0], metadata.block_table[r], int(metadata.seq_lens[r]))
            out[rows] = self.attend(q[rows], keys, values, int(metadata.seq_lens[r]))
        return out


class TakesValuesAtTheStrideOfKeys(LoopBackend):
    def write(self, cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(cache, k, v.as_strided(v.shape, k.stride()), slots)


class TakesQueriesForContiguous(LoopBackend):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Any) -> Any:
        dense = torch.empty(q.shape, device="meta").stride()
        return super().forward(q.as_strided(q.shape, dense), k, v, kv_cache, metadata)


def half_of(values: torch.Tensor) -> torch.dtype:
    return BFLOAT16 if values.dtype == FLOAT32 else values.dtype


class SumsInHalf(LoopBackend):
    """`TILE` keys in float32, then onto a sum in half precision."""

    TILE: ClassVar[int] = 1

    def weigh(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        half = half_of(values)
        sums = torch.zeros(weights.shape[1], weights.shape[0], values.shape[-1], dtype=half)
        for at in range(0, len(values), self.TILE):
            tile = slice(at, at + self.TILE)
            sums = (sums + torch.einsum("hqk,khd->qhd", weights[..., tile], values[tile].float())).to(half)
        return sums.float() / weights.sum(-1).T[..., None]


class SumsTilesInHalf(SumsInHalf):
    TILE = 32


class NormalisesInHalf(LoopBackend):
    def weigh(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        half = half_of(values)
        total = torch.zeros(weights.shape[:2], dtype=half)
        for column in weights.unbind(-1):
            total = (total + column).to(half)
        return torch.einsum("hqk,khd->qhd", weights, values.float()) / total.float().T[..., None]


class RoundsWeights(LoopBackend):
    """To the half precision of the values before they meet them, as flash kernels do; in float32 to bfloat16."""

    def weigh(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return super().weigh(weights.to(half_of(values)).float(), values)


class ScalesQueriesInPlace(LoopBackend):
    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int) -> torch.Tensor:
        return super().attend(q.mul_(self.spec.scale), keys, values, length)

    def scale(self) -> float:
        return 1.0


class ReturnsFloat64(LoopBackend):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Any) -> Any:
        return super().forward(q, k, v, kv_cache, metadata).double()


FAULTS = [
    (SeesTheNextToken, "base", "prompts"),
    (SeesTheNextToken, "base", "chunks"),
    (SeesTheNextToken, "base", "decode"),
    (SeesTheNextOfItsChunk, "base", "prompts"),
    (SeesTheNextOfItsChunk, "window24", "chunks"),
    (SeesNotItself, "base", "prompts"),
    (SeesNotItself, "base", "decode"),
    (DropsTheWindow, "window24", "prompts"),
    (DropsTheWindow, "window24", "decode"),
    (DropsTheWindow, "window1000", "long"),
    (WindowIsOneLonger, "window1", "decode"),
    (WindowIsOneLonger, "window24", "prompts"),
    (WindowIsOneLonger, "window24", "decode"),
    (WindowIsOneShorter, "window32", "prompts"),
    (WindowIsOneShorter, "window32", "decode"),
    (ScaleIsTheUsual, "scale", "decode"),
    (ScaleIsATenthMore, "base", "decode"),
    (DropsTheSoftCap, "softcap", "prompts"),
    (DropsTheSoftCap, "window20-softcap", "decode"),
    (TakesKvHeadsInTurn, "base", "decode"),
    (TakesKvHeadsInTurn, "gqa3", "prompts"),
    (SwapsKeysAndValues, "base", "decode"),
    (KeepsMetadataOfAShape, "base", "reuse"),
    (IgnoresHowFarAChunkIs, "base", "chunks"),
    (IgnoresHowFarAChunkIs, "base", "mixed"),
    (AttendsBeforeTheNextRequestWrites, "base", "shared"),
    (TakesValuesAtTheStrideOfKeys, "base", "decode"),
    (TakesQueriesForContiguous, "base", "prompts"),
]


@pytest.mark.parametrize(("fault", "variant", "scenario"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_backend_fails(target: Target, fault: type[AttentionBackend], variant: str, scenario: str) -> None:
    """In bfloat16, whose tolerance is the widest."""
    with pytest.raises(AssertionError, match="elements out of tolerance"):
        play(target, fault, variant, scenario, BFLOAT16)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("fault", [SumsInHalf, SumsTilesInHalf, NormalisesInHalf], ids=lambda value: value.__name__)
def test_half_precision_inside_fails(target: Target, fault: type[AttentionBackend], dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match="out of tolerance"):
        play(target, fault, "base", "long", dtype)


def test_a_float32_backend_that_rounds_its_weights_fails(target: Target) -> None:
    with pytest.raises(AssertionError, match="out of tolerance"):
        play(target, RoundsWeights, "base", "decode", FLOAT32)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_a_half_precision_backend_may_round_its_weights(target: Target, dtype: torch.dtype) -> None:
    play(target, RoundsWeights, "base", "decode", dtype)
    play(target, RoundsWeights, "base", "long", dtype)


def test_a_failure_says_where_and_by_how_much(target: Target) -> None:
    with pytest.raises(AssertionError) as raised:
        play(target, ScaleIsTheUsual, "scale", "chunks", FLOAT32)
    assert re.fullmatch(
        r"step 0, request 0, positions 0 to 20, blocks \[\d+, \d+\]\n"
        r"  shape \(21, 4, 64\), dtype float32: \d+ of 5376 elements out of tolerance\n"
        r"  worst at \[\d+, \d+, \d+\]: got \S+, expected \S+, difference \S+\n"
        r"  tolerance: rtol 0.0001, atol 0.0001",
        str(raised.value),
    )


def test_inputs_and_the_result_are_named_when_wrong(target: Target) -> None:
    with pytest.raises(AssertionError, match="input q after forward: must be equal bit for bit"):
        play(target, ScalesQueriesInPlace, "base", "prompts", FLOAT32)
    with pytest.raises(AssertionError, match=r"forward gave shape .*, dtype float64; it must be as q: .* float32"):
        play(target, ReturnsFloat64, "base", "prompts", FLOAT32)


class WritesPaddingToSlot0(LoopBackend):
    def write(self, cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(cache, k, v, slots.clamp(min=0))


class WritesPaddingToTheLastSlot(LoopBackend):
    def write(self, cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(cache, k, v, slots % cache[0, ..., 0].numel())


class WritesPaddingBehindOthers(LoopBackend):
    def write(self, cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(cache, k, v, torch.where(slots < 0, slots[0] + 1, slots))


class WritesTheNullBlockToo(LoopBackend):
    def write(self, cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(cache, k, v, slots)
        super().write(cache, k[:1], v[:1], slots[:1] * 0)


def test_writing_a_block_that_no_request_has_fails(target: Target) -> None:
    with pytest.raises(
        AssertionError, match=r"blocks \(0, \d+, \d+, \d+\), which no request has, tensor 0 of the cache"
    ):
        play(target, WritesTheNullBlockToo, "base", "prompts", FLOAT32)


@pytest.mark.parametrize("scenario", ["padded-decode", "padded-mixed"])
@pytest.mark.parametrize("fault", [None, WritesPaddingToSlot0, WritesPaddingToTheLastSlot, WritesPaddingBehindOthers])
def test_padding_that_is_written_fails(target: Target, fault: type[AttentionBackend] | None, scenario: str) -> None:
    one = VARIANTS["base"]
    arguments = (one.spec(BFLOAT16), SCENARIOS[scenario](one.block_size))
    if fault is None:
        attention.test_padding_changes_nothing(target, LoopBackend, *arguments)
        return
    with pytest.raises(AssertionError, match=r"tensor 0 of the cache after step \d with BatchShape|out of tolerance"):
        attention.test_padding_changes_nothing(target, fault, *arguments)


class UsesMetadataUp(LoopBackend):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Any) -> Any:
        out = super().forward(q, k, v, kv_cache, metadata)
        metadata.slot_mapping.fill_(-1)
        return out


def test_metadata_that_serves_one_layer_only_fails(target: Target) -> None:
    arguments = (VARIANTS["base"].spec(BFLOAT16), SCENARIOS["mixed"](16))
    attention.test_layers_share_metadata(target, LoopBackend, *arguments)
    with pytest.raises(AssertionError, match="a second layer"):
        attention.test_layers_share_metadata(target, UsesMetadataUp, *arguments)


class Capturable(LoopBackend):
    """Right: everything that changes is read from static tensors."""

    graph_support = GraphSupport.ALWAYS


class MovesItsMetadata(LoopBackend):
    graph_support = GraphSupport.ALWAYS

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return replace(batch, seq_lens=batch.seq_lens.clone())


class MovesItOutOfDecodesOnly(MovesItsMetadata):
    graph_support = GraphSupport.UNIFORM_DECODE

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return batch if batch.max_query_len == 1 else super().build_metadata(batch)


@dataclass(frozen=True)
class WithHostLens:
    batch: AttentionBatch
    lens: list[int]


class LaunchesWithLengthsOfTheHost(LoopBackend):
    graph_support = GraphSupport.UNIFORM_DECODE

    def build_metadata(self, batch: AttentionBatch) -> WithHostLens:
        return WithHostLens(batch, batch.seq_lens_np.tolist())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Any) -> Any:
        batch = replace(metadata.batch, seq_lens=torch.tensor(metadata.lens))
        return super().forward(q, k, v, kv_cache, batch)


def replay(target: Target, backend: type[AttentionBackend]) -> None:
    arguments = (VARIANTS["base"].spec(FLOAT32), SCENARIOS["replay"](16))
    attention.test_recorded_metadata_serves_later_steps_of_its_shape(target, backend, *arguments)


@pytest.mark.parametrize("backend", [LoopBackend, Capturable, MovesItOutOfDecodesOnly])
def test_metadata_that_a_graph_can_hold_passes(target: Target, backend: type[AttentionBackend]) -> None:
    replay(target, backend)


def test_metadata_that_a_graph_cannot_hold_fails(target: Target) -> None:
    with pytest.raises(AssertionError, match=r"but metadata is elsewhere: metadata\.seq_lens from 0x\w+ to 0x\w+$"):
        replay(target, MovesItsMetadata)
    with pytest.raises(AssertionError, match="elements out of tolerance"):
        replay(target, LaunchesWithLengthsOfTheHost)


def test_tensors_of_metadata_are_found_in_any_container() -> None:
    tensor = torch.zeros(2)
    found = attention.addresses({"plan": [WithHostLens(None, [1]), (3, tensor)], "tiles": tensor})  # type: ignore[arg-type]
    assert found == {"metadata['plan'][1][1]": tensor.data_ptr(), "metadata['tiles']": tensor.data_ptr()}


class CopiesBackwards(LoopBackend):
    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().copy_blocks(kv_cache, dst, src)


class CopiesInReverse(LoopBackend):
    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().copy_blocks(kv_cache, src, dst.flip(0))


class LosesTheLastCopy(LoopBackend):
    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().copy_blocks(kv_cache, src[:-1], dst[:-1])


class CopiesKeysOnly(LoopBackend):
    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().copy_blocks((kv_cache[0][..., : self.spec.head_dim],), src, dst)


class CopiesThroughHalf(LoopBackend):
    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        kv_cache[0][:, dst] = kv_cache[0][:, src].to(FLOAT16).to(kv_cache[0].dtype)


class MovesInsteadOfCopying(LoopBackend):
    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().copy_blocks(kv_cache, src, dst)
        kv_cache[0][:, src] = 0


class CopiesAlongAnotherDimension(LoopBackend):
    """Its layout says so, and so the default copies do."""

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        (tensor,) = super().kv_cache_layout(num_blocks).tensors
        return KVCacheLayout((replace(tensor, block_dim=2),))


class NeedsABlockMore(LoopBackend):
    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        return super().kv_cache_layout(num_blocks + 1)


class LosesASwap(LoopBackend):
    def swap_blocks(self, src_cache: KVCache, dst_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().swap_blocks(src_cache, dst_cache, src[1:], dst[1:])


class SwapsOutWhateverItIsAsked(LoopBackend):
    """The larger cache is the device's: one direction only."""

    def swap_blocks(self, src_cache: KVCache, dst_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        if src_cache[0].numel() < dst_cache[0].numel():
            src_cache, dst_cache, src, dst = dst_cache, src_cache, dst, src
        super().swap_blocks(src_cache, dst_cache, src, dst)


class SwapsOneBlockTooMany(LoopBackend):
    def swap_blocks(self, src_cache: KVCache, dst_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().swap_blocks(src_cache, dst_cache, torch.cat((src, src[-1:])), torch.cat((dst, dst.max()[None] + 1)))


class ClearsWhatItSwaps(LoopBackend):
    def swap_blocks(self, src_cache: KVCache, dst_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().swap_blocks(src_cache, dst_cache, src, dst)
        src_cache[0][:, src] = 0


BlockTest = Callable[[Target, type[AttentionBackend], AttentionSpec], None]


@pytest.mark.parametrize("check", [blocks.test_the_layout_counts_blocks, blocks.test_copies, blocks.test_swaps])
def test_right_blocks_pass(target: Target, check: BlockTest) -> None:
    check(target, LoopBackend, VARIANTS["base"].spec(FLOAT32))


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (blocks.test_the_layout_counts_blocks, CopiesAlongAnotherDimension),
        (blocks.test_the_layout_counts_blocks, NeedsABlockMore),
        (blocks.test_copies, CopiesBackwards),
        (blocks.test_copies, CopiesInReverse),
        (blocks.test_copies, LosesTheLastCopy),
        (blocks.test_copies, CopiesKeysOnly),
        (blocks.test_copies, CopiesThroughHalf),
        (blocks.test_copies, MovesInsteadOfCopying),
        (blocks.test_swaps, LosesASwap),
        (blocks.test_swaps, SwapsOutWhateverItIsAsked),
        (blocks.test_swaps, SwapsOneBlockTooMany),
        (blocks.test_swaps, ClearsWhatItSwaps),
    ],
    ids=lambda value: value.__name__,
)
def test_wrong_blocks_fail(target: Target, check: BlockTest, fault: type[AttentionBackend]) -> None:
    with pytest.raises(AssertionError, match=r"must be equal bit for bit|for one block"):
        check(target, fault, VARIANTS["base"].spec(FLOAT32))


class Declines(LoopBackend):
    reason: ClassVar[str] = "declines everything"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        return cls.reason


class DeclinesWithoutAReason(Declines):
    reason = " "


def test_a_declined_spec_is_skipped_with_the_reason_of_the_backend(target: Target) -> None:
    spec = VARIANTS["base"].spec(FLOAT32)
    with pytest.raises(pytest.skip.Exception, match="declines everything"):
        blocks.test_copies(target, Declines, spec)
    with pytest.raises(AssertionError, match="say why, in words for the user"):
        blocks.test_copies(target, DeclinesWithoutAReason, spec)


def test_cases_cover_all_dtypes_and_a_second_half_precision_thinly() -> None:
    found = list(textbook_cases([BFLOAT16, FLOAT16, FLOAT32]))
    variants = {dtype: {variant for variant, of, _ in found if of == dtype} for dtype in (BFLOAT16, FLOAT16, FLOAT32)}
    assert variants == {BFLOAT16: set(VARIANTS), FLOAT16: set(THIN_VARIANTS), FLOAT32: set(VARIANTS)}
    assert {scenario for _, _, scenario in found} == {
        *("prompts", "chunks", "decode", "mixed", "reuse", "shared", "long", "long-prompts", "long-context", "crowd")
    }
    assert len(set(found)) == len(found)
    assert {variant for variant, _, _ in textbook_cases([FLOAT16, BFLOAT16])} == set(VARIANTS)


def test_thin_cases_ask_every_variant_and_every_scenario_once() -> None:
    found = list(textbook_cases([BFLOAT16, FLOAT16, FLOAT32]))
    thin = list(thinned(found, BFLOAT16))
    assert set(thin) < set(found)
    assert {variant for variant, dtype, _ in thin if dtype == BFLOAT16} == set(VARIANTS)
    assert {scenario for _, _, scenario in thin} == {scenario for _, _, scenario in found}
    assert {dtype for _, dtype, _ in thin} == {BFLOAT16, FLOAT16, FLOAT32}
    by_name = list(thinned(found, BFLOAT16, by_name_only=True))
    assert set(by_name) < set(thin)
    assert {scenario for _, _, scenario in by_name} == {scenario for _, _, scenario in found}
    assert {variant for variant, _, _ in by_name} == set(VARIANTS)
    assert {dtype for _, dtype, _ in by_name} == {BFLOAT16}
