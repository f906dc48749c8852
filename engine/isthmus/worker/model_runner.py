"""One step on one device: gather inputs, run the model, sample. There is no device name in this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from isthmus.layers.env import AttentionGroups, ForwardContext
from isthmus.models.base import CausalLM
from isthmus.ops.registry import BoundOps
from isthmus.platforms import AttentionBatch, BatchShape, GraphBackend, GraphSupport, Platform
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.block_pool import NULL_BLOCK
from isthmus.scheduler.output import BlockOps, ModelRunnerOutput, NewRequestData, RawLogprobs, SchedulerOutput
from isthmus.worker.block_groups import BlockGroups
from isthmus.worker.input_buffers import InputBuffers
from isthmus.worker.kv_cache import KVCachePool
from isthmus.worker.pooler import Pooler
from isthmus.worker.request_state import RequestState
from isthmus.worker.sampler import Sampler, SamplerOutput
from isthmus.worker.token_masks import TokenMasks, masks_of

PROMPT_LOGPROBS_ROWS = 64
"""Prompt positions whose logits are held at once; with static shapes, as many as a step samples."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes that the static buffers are made for."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Step:
    """The batch of one step on the host. Arrays have one entry a request, in batch order.

    sampling: indices of the requests whose known tokens end in this step, so that the next one is sampled; none of
    those that are pooled.
    """

    req_ids: list[str]
    rows: np.ndarray
    num_scheduled: np.ndarray
    num_computed: np.ndarray
    query_start_loc: np.ndarray
    sampling: np.ndarray


class ModelRunner:
    """Runs SchedulerOutputs. The scheduler decides; the runner keeps each running request's tokens and table."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionGroups,
        groups: BlockGroups,
        ops: BoundOps,
        platform: Platform,
        graph: GraphBackend,
        device: torch.device,
        limits: RunnerLimits,
        vocab_size: int,
    ) -> None:
        self._attention = attention
        self._groups = groups
        self._platform = platform
        self._graph = graph
        self._device = device
        self._limits = limits
        self._forward = graph.wrap(model.forward)
        self._graph_support = min(
            (backend.graph_support for backend in attention.backends), default=GraphSupport.ALWAYS
        )
        self._logits = graph.wrap_logits(lambda hidden, rows: model.compute_logits(hidden[rows]))
        self.state = RequestState(limits.max_num_seqs, limits.max_model_len, limits.block_size, len(groups))
        self._max_blocks = self.state.block_tables[0].shape[1]
        self._buffers = InputBuffers(
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            self._max_blocks,
            device,
            num_groups=len(groups),
            pin_memory=platform.pin_memory,
            static_shapes=platform.static_shapes,
        )
        self.sampler = Sampler(vocab_size, limits.max_num_seqs, ops)
        self.pooler = Pooler(limits.max_num_seqs, platform.async_to_host, static_shapes=platform.static_shapes)
        self._prompt_logprobs: dict[str, int] = {}
        self._pool: KVCachePool | None = None
        self._await_inputs: Callable[[], object] = lambda: None
        """Waits until the device has read the host mirrors of a step that nothing waited for, the metadata's too."""

    def allocate(self, num_blocks: Sequence[int], num_host_blocks: Sequence[int] = ()) -> None:
        """Allocate the pool of usable blocks of each group and its host side. The old one, if any, is dropped first."""
        self._pool = None
        self._pool = KVCachePool(
            self._attention, self._groups, num_blocks, self._platform, self._device, num_host_blocks
        )

    @property
    def pool(self) -> KVCachePool:
        if self._pool is None:
            raise RuntimeError("the KV pool is not allocated yet")
        return self._pool

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step. Returns results in batch order."""
        self._update_state(output)
        self.pool.apply(output.block_ops)
        if not output.num_scheduled_tokens:
            return ModelRunnerOutput([])
        step = self._prepare(output)
        hidden, padded = self._run(step)
        prompt_logprobs = self._take_prompt_logprobs(step, hidden, padded) if self._prompt_logprobs else {}
        pooled = self.pooler.pool(step, hidden)
        masks = self._masks(step, output)
        result = self._sample(step, hidden, padded, prompt_logprobs, masks)
        return replace(result, pooled=pooled) if pooled else result

    def _update_state(self, output: SchedulerOutput) -> None:
        """Drop rows first: a freed row, or a finished id, may be used again by a new request of this very step."""
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            row = self.state.remove(request_id)
            if row is not None:
                self.sampler.remove(row)
                self.pooler.leave(row)
                self._prompt_logprobs.pop(request_id, None)
        for request_id in output.finished_req_ids:
            self.pooler.forget(request_id)
        for request_id, block_ids in output.scheduled_cached_reqs.new_block_ids.items():
            others = output.scheduled_cached_reqs.new_window_block_ids.get(request_id, ())
            self.state.append_blocks(self.state.rows[request_id], block_ids, *others)
        for request_id, token_id in output.scheduled_cached_reqs.last_token_ids.items():
            self.state.replace_last_token(self.state.rows[request_id], token_id)
        for data in output.scheduled_new_reqs:
            self._add(data)

    def _add(self, data: NewRequestData) -> None:
        row = self.state.add(data)
        self.pooler.add(row, data)
        self.sampler.add(
            row,
            data.params,
            seed=data.seed,
            num_prompt_tokens=data.num_prompt_tokens,
            stop_ids=data.stop_ids,
            bad_words_ids=data.bad_words_ids,
        )
        if data.params.prompt_logprobs is not None:
            self._prompt_logprobs[data.request_id] = data.params.prompt_logprobs

    def _prepare(self, output: SchedulerOutput) -> Step:
        """Fill the host mirrors of the inputs, all requests at once."""
        self._await_inputs()
        req_ids = list(output.num_scheduled_tokens)
        count = len(req_ids)
        rows = np.fromiter(map(self.state.rows.__getitem__, req_ids), np.int64, count)
        num_scheduled = np.fromiter(output.num_scheduled_tokens.values(), np.int64, count)
        computed = output.scheduled_cached_reqs.num_computed_tokens
        if output.scheduled_new_reqs:
            computed = computed + [data.num_computed_tokens for data in output.scheduled_new_reqs]
        num_computed = np.array(computed, np.int64)

        total = output.total_num_scheduled_tokens
        query_start_loc = np.zeros(count + 1, np.int64)
        np.cumsum(num_scheduled, out=query_start_loc[1:])
        if total == count:
            token_rows, positions = rows, num_computed
        else:
            token_rows = np.repeat(rows, num_scheduled)
            positions = np.arange(total) + np.repeat(num_computed - query_start_loc[:-1], num_scheduled)
        size = self._limits.block_size
        buffers = self._buffers
        buffers.input_ids.np[:total] = self.state.token_ids[token_rows, positions]
        buffers.positions.np[:total] = positions
        for slots, state_table in zip(buffers.slot_mappings, self.state.block_tables, strict=True):
            slots.np[:total] = state_table[token_rows, positions // size] * size + positions % size
        buffers.query_start_loc.np[: count + 1] = query_start_loc
        seq_lens = num_computed + num_scheduled
        buffers.seq_lens.np[:count] = seq_lens
        blocks = -(-int(seq_lens.max()) // size)
        for table, state_table in zip(buffers.block_tables, self.state.block_tables, strict=True):
            table.np[:count, :blocks] = state_table[rows, :blocks]
        sampling = np.flatnonzero((seq_lens == self.state.num_tokens[rows]) & ~self.pooler.is_pooled(rows))
        return Step(req_ids, rows, num_scheduled, num_computed, query_start_loc, sampling)

    def _batches(self, num_tokens: int, num_reqs: int, padded: BatchShape) -> list[AttentionBatch]:
        """Device views of the step at its padded shape, one a block group: they differ in slots and tables only.

        Padding tokens write nowhere; padding requests are empty.
        """
        buffers = self._buffers
        buffers.input_ids.np[num_tokens : padded.num_tokens] = 0
        buffers.positions.np[num_tokens : padded.num_tokens] = 0
        buffers.query_start_loc.np[num_reqs + 1 : padded.num_reqs + 1] = num_tokens
        buffers.seq_lens.np[num_reqs : padded.num_reqs] = 0
        seq_lens = buffers.seq_lens.np[: padded.num_reqs]
        max_seq_len = int(seq_lens.max())
        max_blocks = -(-max_seq_len // self._limits.block_size)
        width = self._max_blocks if self._platform.static_shapes else max_blocks
        query_start_loc = buffers.query_start_loc.commit(padded.num_reqs + 1)
        seq_lens_on_device = buffers.seq_lens.commit(padded.num_reqs)
        batches = []
        for slots, table in zip(buffers.slot_mappings, buffers.block_tables, strict=True):
            slots.np[num_tokens : padded.num_tokens] = -1
            table.np[num_reqs : padded.num_reqs, :max_blocks] = 0
            table.np[: padded.num_reqs, max_blocks:width] = 0
            batches.append(
                AttentionBatch(
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens_on_device,
                    block_table=table.commit(padded.num_reqs, width),
                    slot_mapping=slots.commit(padded.num_tokens),
                    num_reqs=padded.num_reqs,
                    num_tokens=num_tokens,
                    max_query_len=padded.max_query_len,
                    max_seq_len=max_seq_len,
                    query_start_loc_np=buffers.query_start_loc.np[: padded.num_reqs + 1],
                    seq_lens_np=seq_lens,
                )
            )
        return batches

    def _run(self, step: Step) -> tuple[torch.Tensor, BatchShape]:
        """Hidden states [T, hidden_size], those of the step's tokens first, and the shape that the step was run at."""
        num_tokens, num_reqs = int(step.query_start_loc[-1]), len(step.req_ids)
        padded = self._graph.pad(BatchShape(num_tokens, num_reqs, int(step.num_scheduled.max())))
        batches = self._batches(num_tokens, num_reqs, padded)
        context = ForwardContext(
            kv_caches=self.pool.caches,
            metadata=tuple(
                backend.build_metadata(batches[group])
                for backend, group in zip(self._attention.backends, self._groups.of_attention, strict=True)
            ),
            shape=padded,
            graph_support=self._graph_support,
        )
        input_ids = self._buffers.input_ids.commit(padded.num_tokens)
        positions = self._buffers.positions.commit(padded.num_tokens)
        if self._platform.pin_memory and not len(step.sampling):  # one that samples waits for its token anyway
            self._await_inputs = self._platform.async_to_host(positions[:1])
        hidden: torch.Tensor = self._forward(input_ids, positions, context)
        return hidden, padded

    def _sample(
        self,
        step: Step,
        hidden: torch.Tensor,
        padded: BatchShape,
        prompt_logprobs: dict[str, tuple[int, list[RawLogprobs]]],
        masks: TokenMasks | None,
    ) -> ModelRunnerOutput:
        sampled: list[list[int]] = [[] for _ in step.req_ids]
        if not len(step.sampling):
            return ModelRunnerOutput(sampled, prompt_logprobs=prompt_logprobs)
        rows = step.rows[step.sampling]
        result = self._sample_rows(hidden, padded, step.query_start_loc[step.sampling + 1] - 1, rows, masks)
        token_ids = self._platform.async_to_host(result.token_ids)().numpy()[: len(rows)]
        self.state.append_tokens(rows, token_ids)
        for index, token in zip(step.sampling.tolist(), token_ids.tolist(), strict=True):
            sampled[index] = [token]
        invalid = frozenset(step.req_ids[step.sampling[position]] for position in result.invalid_rows)
        logprobs = {
            step.req_ids[index]: [entry]
            for index, entry in zip(step.sampling, result.logprobs or (), strict=False)
            if entry is not None
        }
        return ModelRunnerOutput(sampled, logprobs, prompt_logprobs, invalid)

    def _masks(self, step: Step, output: SchedulerOutput) -> TokenMasks | None:
        if not output.token_masks:
            return None
        return masks_of([step.req_ids[index] for index in step.sampling], output.token_masks)

    def _sample_rows(
        self,
        hidden: torch.Tensor,
        padded: BatchShape,
        places: np.ndarray,
        rows: np.ndarray,
        masks: TokenMasks | None = None,
    ) -> SamplerOutput:
        """The next token of `rows`, whose last ones are at `places` of the batch; perhaps more, that mean nothing."""
        is_static, count = self._platform.static_shapes, len(rows)
        if is_static:
            places, rows = _repeat_first(places, padded.num_reqs), _repeat_first(rows, padded.num_reqs)
        self._buffers.logits_indices.np[: len(rows)] = places
        logits = self._logits(hidden, self._buffers.logits_indices.commit(len(rows)))
        if is_static and (masks is not None or self.sampler.needs_logits(rows)):
            logits, rows = self._platform.async_to_host(logits)()[:count], rows[:count]
        return self.sampler.sample(logits, rows, self.state.token_ids, self.state.num_tokens, masks)

    def _take_prompt_logprobs(
        self, step: Step, hidden: torch.Tensor, padded: BatchShape
    ) -> dict[str, tuple[int, list[RawLogprobs]]]:
        """For requests that want them: log-probabilities of the prompt tokens that follow this step's positions."""
        found: dict[str, tuple[int, list[RawLogprobs]]] = {}
        at_once = padded.num_reqs if self._platform.static_shapes else PROMPT_LOGPROBS_ROWS
        for index, request_id in enumerate(step.req_ids):
            k = self._prompt_logprobs.get(request_id)
            if k is None:
                continue
            row, first = step.rows[index], int(step.num_computed[index])
            prompt = int(self.state.num_prompt_tokens[row])
            last = min(first + int(step.num_scheduled[index]), prompt - 1)
            entries: list[RawLogprobs] = []
            for at in range(first, last, at_once):
                end = min(at + at_once, last)
                offset = int(step.query_start_loc[index]) - first
                logits = self._logits_at(hidden, np.arange(at + offset, end + offset), at_once)
                next_ids = torch.from_numpy(self.state.token_ids[row, at + 1 : end + 1].astype(np.int64))
                entries.extend(self.sampler.prompt_logprobs(logits, next_ids.to(logits.device), k))
            if entries:
                found[request_id] = (first + 1, entries)
        return found

    def _logits_at(self, hidden: torch.Tensor, places: np.ndarray, at_once: int) -> torch.Tensor:
        """Logits at some places of the batch, at most `at_once`."""
        if not self._platform.static_shapes:
            return self._logits(hidden, torch.from_numpy(places).to(self._device))
        rows = torch.from_numpy(_repeat_first(places, at_once)).to(self._device)
        return self._platform.async_to_host(self._logits(hidden, rows))()[: len(places)]

    def profile(self, num_tokens: int, num_logits: int) -> None:
        """One forward of a single sequence of `num_tokens` and `num_logits` rows of logits, on a scratch pool."""
        size = self._limits.block_size
        blocks = -(-num_tokens // size)
        self.allocate([blocks] * len(self._groups))
        step = self._made_up([num_tokens])
        for slots, table in zip(self._buffers.slot_mappings, self._buffers.block_tables, strict=True):
            slots.np[:num_tokens] = np.arange(num_tokens) + size
            table.np[0, :blocks] = np.arange(1, blocks + 1)
        hidden, _ = self._run(step)
        self._logits(hidden, torch.arange(num_logits).to(self._device)).float()
        self._platform.synchronize(self._device)
        self._pool = None

    def warm_up(self, shapes: Sequence[BatchShape]) -> None:
        """A step of each shape, in their order; nothing is written to the pool. The policy may record them."""
        for shape in shapes:
            hidden, padded = self._run(self._made_up(query_lens(shape)))
            if self._platform.static_shapes:
                self._warm_up_sampling(hidden, padded)
        if shapes and self._platform.static_shapes:
            self.pool.apply([BlockOps(copy=((NULL_BLOCK, NULL_BLOCK),))] * len(self._groups))
        self._platform.synchronize(self._device)

    def _warm_up_sampling(self, hidden: torch.Tensor, padded: BatchShape) -> None:
        """Sample for a made-up request, the most likely token and a random one."""
        first = np.zeros(1, np.int64)
        for temperature in (0, 1):
            self.sampler.add(0, SamplingParams(temperature=temperature), seed=0, num_prompt_tokens=0)
            self._platform.async_to_host(self._sample_rows(hidden, padded, first, first).token_ids)()
        self.sampler.remove(0)

    def _made_up(self, lens: Sequence[int]) -> Step:
        """New requests with queries of these lengths; their tokens have no slot, their tables are empty."""
        self._await_inputs()
        count, total = len(lens), sum(lens)
        num_scheduled = np.array(lens, np.int64)
        query_start_loc = np.zeros(count + 1, np.int64)
        np.cumsum(num_scheduled, out=query_start_loc[1:])
        buffers = self._buffers
        buffers.input_ids.np[:total] = 0
        buffers.positions.np[:total] = np.arange(total) - np.repeat(query_start_loc[:-1], num_scheduled)
        buffers.query_start_loc.np[: count + 1] = query_start_loc
        buffers.seq_lens.np[:count] = num_scheduled
        for slots, table in zip(buffers.slot_mappings, buffers.block_tables, strict=True):
            slots.np[:total] = -1
            table.np[:count, : -(-max(lens) // self._limits.block_size)] = 0
        zeros = np.zeros(count, np.int64)
        return Step([""] * count, zeros, num_scheduled, zeros, query_start_loc, zeros[:0])


def query_lens(shape: BatchShape) -> list[int]:
    """Queries of a step of this shape: one token each, and more for the first ones, as far as there are tokens."""
    longer, rest = divmod(shape.num_tokens - shape.num_reqs, max(shape.max_query_len - 1, 1))
    lens = [shape.max_query_len] * min(longer, shape.num_reqs)
    lens += [1 + rest] * (len(lens) < shape.num_reqs)
    return lens + [1] * (shape.num_reqs - len(lens))


def _repeat_first(values: np.ndarray, count: int) -> np.ndarray:
    """`values` [n], then the first of them until there are `count`."""
    return np.concatenate([values, np.repeat(values[:1], count - len(values))])
