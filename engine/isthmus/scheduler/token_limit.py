"""How long a request may become, and which can never fit."""

from __future__ import annotations

from functools import partial

from isthmus.errors import InvalidParamsError, NeverFitsError
from isthmus.scheduler.kv_cache_manager import KVCacheManager
from isthmus.scheduler.request import Request


def token_limit(
    request: Request, kv: KVCacheManager, *, num_reserved: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Prompt plus outputs at most. The last token is never written to the cache, so it needs no slot.

    num_reserved: blocks that the request can never have. Raises NeverFitsError if even an empty pool could not hold so
    many tokens, of each beam; InvalidParamsError for more beams than may run.
    """
    width = 1 if request.beams is None else request.beams.params.beam_width
    if width > max_num_seqs:
        raise InvalidParamsError(
            f"BeamSearchParams.beam_width={width}: every beam is a request, and scheduler.max_num_seqs is "
            f"{max_num_seqs}; search with fewer beams, or raise it"
        )
    usable = kv.pool.num_blocks - num_reserved
    num_shared = request.num_prompt_tokens // kv.block_size
    fits = partial(kv.fits_at_all, reserved=num_reserved, num_sequences=width, num_shared=num_shared)
    wanted = request.params.max_tokens
    limit = max_model_len if wanted is None else request.num_prompt_tokens + wanted
    if wanted is None and not fits(limit - 1):
        limit = (num_shared + (usable - num_shared) // width) * kv.block_size + 1
    limit = max(min(limit, max_model_len), request.num_prompt_tokens + 1)
    if not fits(limit - 1):
        raise _never_fits(request, kv, limit, usable, width)
    return limit


def _never_fits(request: Request, kv: KVCacheManager, limit: int, usable: int, width: int) -> NeverFitsError:
    num_shared = request.num_prompt_tokens // kv.block_size
    needed = num_shared + width * (kv.num_blocks_for(limit - 1) - num_shared)
    reserved = f" ({usable} without the reserved ones)" if usable != kv.pool.num_blocks else ""
    beams = f" of each of {width} beams" if width > 1 else ""
    return NeverFitsError(
        f"request {request.request_id!r} needs {needed} blocks ({request.num_prompt_tokens} prompt tokens, "
        f"up to {limit - request.num_prompt_tokens} output tokens{beams}, block size {kv.block_size}), "
        f"the pool has {kv.pool.num_blocks}{reserved}; shorten the prompt, lower max_tokens, or raise "
        f"cache.num_blocks or cache.memory_fraction",
        needed_blocks=needed,
        available_blocks=usable,
    )
