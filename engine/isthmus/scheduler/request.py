"""A request as the engine core sees it: token ids, progress, blocks. No text, no tensors."""

from __future__ import annotations

import copy
import enum
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus.outputs import FinishReason
from isthmus.pooling_params import PoolingParams
from isthmus.sampling_params import SamplingParams
from isthmus.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams

if TYPE_CHECKING:
    from isthmus.scheduler.beam import BeamGroup
    from isthmus.structured.grammar import GrammarState


class RequestStatus(enum.Enum):
    """Where a request is. HELD ones wait for the prompt that their leader computes for all of them, or, without a place
    on the device, for the other beams of their group. WAITING covers
    requests that were preempted to be recomputed: they come back like new ones, with their outputs. SWAPPED ones have
    their blocks on the host.
    """

    HELD = "held"
    WAITING = "waiting"
    SWAPPED = "swapped"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """Mutable state of one request, owned by the scheduler.

    token_ids: prompt, then outputs.  num_placeholders: tokens that steps under way will sample.
    num_computed_tokens: KV positions that are valid, or will be when the steps under way end; always <= num_tokens +
    num_placeholders.  block_ids: its block table.  window_tables: those of the other block groups.
    host_tables: where its blocks are while it is swapped, a table a group.  block_hashes: chained hashes of its full
    blocks, as far as they were needed.  num_published_blocks: how many of its blocks are findable by hash.
    num_cached_tokens: prompt tokens found in the prefix cache at first admission, -1 before.  admitted_s: when that
    was.
    cache_keys: what beside the tokens its keys and values depend on, by kind ("salt", "adapter" with the id of its
    weights, ...): only requests that are equal in all of it share blocks.
    leader: the request of the same group whose blocks it begins with, until it is admitted.  num_siblings: requests of
    its group, itself included.  beams: the beam search that it is a part of.  pooling: how its prompt becomes a
    vector, which ends it; None = it is sampled.  claim: the scheduling policy's own.
    grammar: how far the output has got in the grammar that it must follow.
    """

    __slots__ = (
        "admitted_s",
        "arrival_s",
        "bad_words_ids",
        "beams",
        "block_hashes",
        "block_ids",
        "cache_keys",
        "claim",
        "eos_token_ids",
        "grammar",
        "host_tables",
        "is_system",
        "leader",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_siblings",
        "params",
        "pooling",
        "priority",
        "request_id",
        "seed",
        "status",
        "stop_ids",
        "tenant",
        "token_ids",
        "window_tables",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
        seed: int = 0,
        arrival_s: float | None = None,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        cache_keys: Mapping[str, str] | None = None,
        pooling: PoolingParams | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.pooling = pooling
        self.eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self.stop_ids = self.eos_token_ids | frozenset(params.stop_token_ids or ())
        self.bad_words_ids = tuple(tuple(ids) for ids in bad_words_ids)
        self.cache_keys = dict(cache_keys or {})
        if params.cache_salt is not None:
            self.cache_keys["salt"] = params.cache_salt
        self.seed = seed
        self.priority = scheduling.priority
        self.tenant = scheduling.tenant
        self.is_system = scheduling.is_system
        self.claim: Any = None
        self.leader: Request | None = None
        self.beams: BeamGroup | None = None
        self.grammar: GrammarState | None = None
        self.num_siblings = 1
        self.arrival_s = time.monotonic() if arrival_s is None else arrival_s
        self.admitted_s: float | None = None
        self.max_total_tokens = 0
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_placeholders = 0
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.window_tables: list[list[int]] = []
        self.host_tables: list[list[int]] = []
        self.block_hashes: list[bytes] = []
        self.num_published_blocks = 0

    def sibling(self, request_id: str, seed: int) -> Request:
        """A new request that differs in id and seed only."""
        other = copy.copy(self)
        other.request_id = request_id
        other.seed = seed
        other.token_ids = self.token_ids[: self.num_prompt_tokens]
        other.block_ids, other.window_tables, other.host_tables, other.block_hashes = [], [], [], []
        return other

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every token must run: what is wanted of the prompt is not in the cache."""
        wants_sum = self.pooling is not None and self.pooling.needs_all_tokens
        return wants_sum or self.params.prompt_logprobs is not None

    def stop_check(self) -> tuple[FinishReason, int | None] | None:
        """Whether the token just appended ends the request: (reason, the stop token id that the user named).

        The context limit holds even where min_tokens asks for more, and so does the end of a grammar.
        """
        token = self.token_ids[-1]
        if token in self.stop_ids and self.num_output_tokens >= self.params.min_tokens:
            return FinishReason.STOP, None if token in self.eos_token_ids else token
        if self.grammar is not None:
            self.grammar.accept(self.token_ids, self.num_prompt_tokens)
            if self.grammar.is_complete:
                return FinishReason.STOP, None
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH, None
        return None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt {self.num_prompt_tokens}, "
            f"output {self.num_output_tokens}, computed {self.num_computed_tokens}, {len(self.block_ids)} blocks)"
        )
