"""The KV cache: its blocks, its memory and the reuse of prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import AUTO, Spec
from isthmus.config.model import DTYPES
from isthmus.config.section import Section

CACHE_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Section):
    """The KV cache. A resolved `num_blocks` of None means: sized from free memory once the model is loaded."""

    path: ClassVar[str] = "cache"

    block_size: Annotated[int, Spec(fallback=16, min=1, unit="tokens", help="Tokens that one KV block holds.")] = AUTO
    num_blocks: Annotated[
        int | None,
        Spec(
            fallback=None,
            min=1,
            unit="blocks",
            help="Blocks that requests can use; none sizes the pool from free memory once the model is loaded.",
        ),
    ] = AUTO
    memory_fraction: Annotated[
        float,
        Spec(
            fallback=0.9,
            above=0,
            max=1,
            help="Share of the memory that is free after weights and activations which the KV cache takes; not read "
            "when cache.num_blocks is given.",
        ),
    ] = AUTO
    memory_cap_bytes: Annotated[
        int | None,
        Spec(
            fallback=None,
            min=1,
            unit="bytes",
            help="Most memory that the KV cache takes, whatever cache.memory_fraction allows; none is no cap.",
        ),
    ] = AUTO
    swap_space_gib: Annotated[
        float,
        Spec(
            fallback=4.0,
            min=0,
            unit="GiB",
            help="Host memory for the blocks of preempted requests and for prefixes that the device had to give up; 0 "
            "is none.",
        ),
    ] = AUTO
    kv_cache_dtype: Annotated[
        str,
        Spec(
            choices=CACHE_DTYPES,
            help="Type of cached keys and values, of those that the platform has; auto is model.dtype.",
        ),
    ] = AUTO
    enable_prefix_caching: Annotated[
        bool, Spec(help="Whether requests reuse the KV blocks of a prefix that was computed before.")
    ] = True
    prefix_hash_seed: Annotated[
        int | None,
        Spec(
            min=0,
            max=2**63 - 1,
            help="Salt of the block hashes, for hashes that repeat between runs; none takes a random one at start.",
        ),
    ] = None
