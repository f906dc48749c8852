"""Masks of allowed tokens, one bit a token, on any device. Plain torch: no kernel of its own is worth its upkeep."""

from __future__ import annotations

import torch

WORD_BITS = 32


def apply_token_masks(logits: torch.Tensor, positions: torch.Tensor, words: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    logits [N, V], any float dtype.  positions [M] int64: rows of logits that have a mask, each once.  words [M, W]
    int32, W * 32 >= V: bit i of word w, the lowest first, stands for token 32 * w + i; 1 = allowed. All on one device.
    """
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    bits = words[:, token_ids // WORD_BITS] >> (token_ids % WORD_BITS).to(torch.int32)
    logits[positions] = logits[positions].masked_fill((bits & 1) == 0, -torch.inf)
