"""From logits to token ids for one batch: per-request parameters in rows, then one call of the `sample` op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isthmus.ops.registry import BoundOps
from isthmus.ops.sampling import GAMMA, mix64
from isthmus.ops.token_mask import apply_token_masks
from isthmus.sampling_params import SamplingParams
from isthmus.worker.sampling_rows import FlatLists, IntArray, RowSet, TokenLists, TokenSequences
from isthmus.worker.token_masks import TokenMasks

TokenLogprobs = dict[int, tuple[float, int]]
"""Token id -> (log-probability, rank from 1), most likely first."""

_ANY_TOKEN = -1
_LARGEST_FACTOR = 1e30
"""Larger factors on a logit, or smaller than its inverse, have the same effect but could overflow float32."""
_NEUTRAL = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """token_ids [N] int64 where the logits are, in the order of the batch.

    logprobs: one entry a row, None for rows that asked for none; None if no row asked.
    invalid_rows: positions in the batch whose masks left no token; their token id means nothing.
    """

    token_ids: torch.Tensor
    logprobs: list[TokenLogprobs | None] | None = None
    invalid_rows: tuple[int, ...] = ()


class Sampler:
    """Sampling state of every row, and the step that uses it.

    A row's token depends on its logits, its history, its parameters and its seed; never on what else is in the
    batch. Token n of the output is drawn with a number made of (seed, n) alone, so preemption does not change it.
    """

    def __init__(self, vocab_size: int, max_num_rows: int, ops: BoundOps) -> None:
        self._vocab_size = vocab_size
        self._sample_op = ops.sample

        def column(dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            return np.zeros(max_num_rows, dtype=dtype)

        self._seed, self._top_k = column(np.int64), column(np.int64)
        self._temperature, self._top_p, self._min_p = column(np.float32), column(np.float32), column(np.float32)
        self._presence, self._frequency, self._repetition = column(np.float32), column(np.float32), column(np.float32)
        self._num_prompt_tokens, self._min_tokens = column(np.int64), column(np.int64)
        self._num_logprobs = column(np.int64)

        self._random_rows, self._top_k_rows = RowSet(max_num_rows), RowSet(max_num_rows)
        self._top_p_rows, self._min_p_rows = RowSet(max_num_rows), RowSet(max_num_rows)
        self._edited_rows, self._penalised_rows = RowSet(max_num_rows), RowSet(max_num_rows)
        self._sequence_rows, self._logprob_rows = RowSet(max_num_rows), RowSet(max_num_rows)
        self._allowed_ids, self._banned_ids = TokenLists(max_num_rows), TokenLists(max_num_rows)
        self._stop_ids, self._bias = TokenLists(max_num_rows), TokenLists(max_num_rows)
        self._banned_sequences: dict[int, TokenSequences] = {}

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        num_prompt_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        bad_words_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Put a request into `row`, replacing what was there.

        seed: any integer; its low 64 bits count.  stop_ids: every id that ends the output, masked until
        `params.min_tokens`.  bad_words_ids: `params.bad_words` as token sequences, none empty.
        """
        temperature = np.float32(min(params.temperature, _LARGEST_FACTOR))
        is_random = bool(temperature > 0)
        repetition = min(max(params.repetition_penalty, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)
        penalties = (params.presence_penalty, params.frequency_penalty, repetition)
        has_penalty = penalties != (0, 0, 1)
        sequences = [ids for ids in bad_words_ids if len(ids) > 1]
        bias = params.logit_bias_by_id

        self._seed[row] = (seed + 2**63) % 2**64 - 2**63
        self._num_prompt_tokens[row], self._min_tokens[row] = num_prompt_tokens, params.min_tokens
        self._temperature[row] = temperature
        # Greedy rows have no use for filters, whatever they ask.
        self._top_k[row] = max(params.top_k, 0) if is_random else 0
        self._top_p[row], self._min_p[row] = (params.top_p, params.min_p) if is_random else (1.0, 0.0)
        self._presence[row], self._frequency[row], self._repetition[row] = penalties
        self._num_logprobs[row] = params.logprobs or 0

        self._random_rows.put(row, is_random)
        self._top_k_rows.put(row, 0 < int(self._top_k[row]) < self._vocab_size)
        self._top_p_rows.put(row, float(self._top_p[row]) < 1)
        self._min_p_rows.put(row, float(self._min_p[row]) > 0)
        self._penalised_rows.put(row, has_penalty)
        self._logprob_rows.put(row, params.logprobs is not None)
        self._allowed_ids.put(row, params.allowed_token_ids or ())
        self._banned_ids.put(row, [ids[0] for ids in bad_words_ids if len(ids) == 1])
        self._stop_ids.put(row, sorted(stop_ids) if params.min_tokens > 0 else ())
        self._bias.put(row, list(bias), list(bias.values()))
        self._sequence_rows.put(row, bool(sequences))
        if sequences:
            self._banned_sequences[row] = TokenSequences.of(sequences)
        self._edited_rows.put(
            row, bool(params.allowed_token_ids or bad_words_ids or params.min_tokens > 0 or bias or has_penalty)
        )

    def remove(self, row: int) -> None:
        """Forget the request in `row`."""
        self.add(row, _NEUTRAL, seed=0, num_prompt_tokens=0)

    def needs_logits(self, rows: IntArray) -> bool:
        """Whether more is done with the logits of these rows than sampling: edits, or logprobs."""
        return bool(self._edited_rows.positions(rows).size or self._logprob_rows.positions(rows).size)

    def sample(
        self,
        logits: torch.Tensor,
        rows: IntArray,
        token_ids: IntArray,
        num_tokens: IntArray,
        masks: TokenMasks | None = None,
    ) -> SamplerOutput:
        """Sample the next token of each row of the batch.

        logits [N, V], any float dtype, not changed.  rows [N]: the row of each batch position.  token_ids
        [max_num_rows, L]: prompt and output so far of each row, of which num_tokens [max_num_rows] count.  masks: of
        this step, beside those that rows have from their parameters.
        """
        num_output_tokens = num_tokens[rows] - self._num_prompt_tokens[rows]
        adjusted, invalid_rows = self._adjust(logits, rows, token_ids, num_tokens, num_output_tokens, masks)
        seeds = mix64(torch.from_numpy(self._seed[rows]) + torch.from_numpy(num_output_tokens + 1) * GAMMA)
        sampled = self._sample_op(
            adjusted,
            self._column(self._temperature, self._random_rows, rows, logits.device),
            self._column(self._top_k, self._top_k_rows, rows, logits.device),
            self._column(self._top_p, self._top_p_rows, rows, logits.device),
            self._column(self._min_p, self._min_p_rows, rows, logits.device),
            seeds.to(logits.device),
        )
        return SamplerOutput(sampled, self._logprobs(logits, sampled, rows), invalid_rows)

    def prompt_logprobs(self, logits: torch.Tensor, next_ids: torch.Tensor, k: int) -> list[TokenLogprobs]:
        """Logprobs of the prompt tokens that followed: logits [P, V], next_ids [P] int64 on the same device."""
        return _top_logprobs(logits, next_ids, [k] * logits.shape[0])

    def _column(
        self, values: npt.NDArray[Any], users: RowSet, rows: IntArray, device: torch.device
    ) -> torch.Tensor | None:
        """A parameter of the batch, or None if no row of the batch uses it."""
        if not users.positions(rows).size:
            return None
        return torch.from_numpy(values[rows]).to(device)

    def _adjust(
        self,
        logits: torch.Tensor,
        rows: IntArray,
        token_ids: IntArray,
        num_tokens: IntArray,
        num_output_tokens: IntArray,
        masks: TokenMasks | None,
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Logits in float32 with masks, bias and penalties, and the positions that are left without a token."""
        edited = self._edited_rows.positions(rows)
        if masks is not None:
            edited = np.union1d(edited, masks.positions)
        if not edited.size:
            return logits.float(), ()
        logits = logits.to(torch.float32, copy=True)
        self._apply_allowed(logits, rows)
        if masks is not None:
            at, words = torch.from_numpy(masks.positions), torch.from_numpy(masks.words)
            apply_token_masks(logits, at.to(logits.device), words.to(logits.device))
        self._apply_bans(logits, self._banned_ids.flat(rows))
        self._apply_banned_sequences(logits, rows, token_ids, num_tokens)
        self._apply_bans(logits, self._stop_ids.flat(rows, where=num_output_tokens < self._min_tokens[rows]))
        self._apply_bias(logits, rows)
        self._apply_penalties(logits, rows, token_ids, num_tokens)
        has_token = torch.isfinite(logits[torch.from_numpy(edited).to(logits.device)]).any(dim=-1).cpu().numpy()
        return logits, tuple(edited[~has_token].tolist())

    def _apply_allowed(self, logits: torch.Tensor, rows: IntArray) -> None:
        allowed = self._allowed_ids.flat(rows)
        if allowed is None:
            return
        index = allowed.index(logits.device)
        kept = logits[index]
        logits[index[0].unique()] = -torch.inf
        logits[index] = kept

    def _apply_bans(self, logits: torch.Tensor, banned: FlatLists | None) -> None:
        if banned is not None:
            logits[banned.index(logits.device)] = -torch.inf

    def _apply_banned_sequences(
        self, logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_tokens: IntArray
    ) -> None:
        for position in self._sequence_rows.positions(rows).tolist():
            row = int(rows[position])
            banned = self._banned_sequences[row].banned_after(token_ids[row, : num_tokens[row]])
            if banned.size:
                logits[position, torch.from_numpy(banned).to(logits.device)] = -torch.inf

    def _apply_bias(self, logits: torch.Tensor, rows: IntArray) -> None:
        bias = self._bias.flat(rows)
        if bias is not None:
            logits.index_put_(bias.index(logits.device), bias.values.to(logits.device), accumulate=True)

    def _apply_penalties(self, logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_tokens: IntArray) -> None:
        """Repetition over prompt and output, then frequency and presence over the output."""
        positions = self._penalised_rows.positions(rows)
        if not positions.size:
            return
        members = rows[positions]
        history = token_ids[members, : num_tokens[members].max()].astype(np.int64)
        column = np.arange(history.shape[1])
        is_token = column < num_tokens[members, None]
        is_output = is_token & (column >= self._num_prompt_tokens[members, None])
        is_seen = self._count(history, is_token, logits.device) > 0
        output_counts = self._count(history, is_output, logits.device)

        def per_row(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values[members, None]).to(logits.device)

        at = torch.from_numpy(positions).to(logits.device)
        before = logits[at]
        repetition = per_row(self._repetition)
        after = torch.where(is_seen, torch.where(before > 0, before / repetition, before * repetition), before)
        after -= per_row(self._frequency) * output_counts
        after -= per_row(self._presence) * (output_counts > 0)
        logits[at] = after

    def _count(self, token_ids: IntArray, counts: npt.NDArray[np.bool_], device: torch.device) -> torch.Tensor:
        """How often each id occurs in each row where `counts` [M, L] is true: [M, V] float32."""
        ids = torch.from_numpy(np.where(counts, token_ids, 0)).to(device)
        ones = torch.from_numpy(counts.astype(np.float32)).to(device)
        zeros = torch.zeros(ids.shape[0], self._vocab_size, dtype=torch.float32, device=device)
        return zeros.scatter_add_(1, ids, ones)

    def _logprobs(
        self, logits: torch.Tensor, sampled: torch.Tensor, rows: IntArray
    ) -> list[TokenLogprobs | None] | None:
        positions = self._logprob_rows.positions(rows)
        if not positions.size:
            return None
        at = torch.from_numpy(positions).to(logits.device)
        found = _top_logprobs(logits[at], sampled[at], self._num_logprobs[rows[positions]].tolist())
        result: list[TokenLogprobs | None] = [None] * len(rows)
        for position, logprobs in zip(positions.tolist(), found, strict=True):
            result[position] = logprobs
        return result


def _top_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """For each row of logits [M, V], its num_top[m] most likely ids and the chosen one [M], by rank.

    The logprobs are those of the raw logits, in float32. Ranks are distinct: of equal ones the lower id comes first,
    as in argmax, so the greedy token always has rank 1.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    # Logprobs are <= 0, where the bits of the magnitude, read as an integer, grow as the value falls.
    magnitude = logprobs.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    order = (magnitude << 32) | torch.arange(logprobs.shape[1], device=logprobs.device)
    top = order.topk(max(1, min(max(num_top), logprobs.shape[1])), largest=False).values & 0xFFFFFFFF
    chosen = chosen[:, None]
    chosen_rank = (order < order.gather(1, chosen)).sum(dim=-1) + 1
    columns = (top, logprobs.gather(1, top), chosen, logprobs.gather(1, chosen), chosen_rank)
    result = []
    for k, ids, values, chosen_id, chosen_value, rank in zip(num_top, *(c.tolist() for c in columns), strict=True):
        entries = {token_id: (value, i + 1) for i, (token_id, value) in enumerate(zip(ids[:k], values, strict=False))}
        entries.setdefault(chosen_id[0], (chosen_value[0], rank))
        result.append(entries)
    return result
