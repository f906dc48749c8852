"""The masks of a step's rows, as the scheduler's side found them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isthmus.worker.sampling_rows import IntArray


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """words[i] [W] int32 says which tokens the row at batch position positions[i] may get; see ops/token_mask.py."""

    positions: IntArray
    words: npt.NDArray[np.int32]


def masks_of(req_ids: Sequence[str], words: Mapping[str, npt.NDArray[np.int32]]) -> TokenMasks | None:
    """Those of the requests `req_ids`, which are sampled in this order; None if none of them has one."""
    positions = [position for position, request_id in enumerate(req_ids) if request_id in words]
    if not positions:
        return None
    return TokenMasks(np.array(positions, np.int64), np.stack([words[req_ids[position]] for position in positions]))
