"""Masks of allowed tokens against a loop over their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.ops.token_mask import apply_token_masks
from isthmus.sampling_params import SamplingParams
from isthmus.worker.sampler import Sampler
from isthmus.worker.token_masks import TokenMasks, masks_of


def words_of(allowed: list[list[int]], vocab_size: int) -> np.ndarray:
    words = np.zeros((len(allowed), -(-vocab_size // 32)), np.uint32)
    for row, ids in zip(words, allowed, strict=True):
        for token_id in ids:
            row[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words.view(np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 384, 5003])
def test_only_the_bits_that_are_set_keep_their_logit(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator).to(dtype)
    positions = [3, 0]
    allowed = [
        sorted({0, vocab_size - 1, vocab_size // 2, min(31, vocab_size - 1)}),
        torch.randint(vocab_size, (vocab_size // 3,), generator=generator).tolist(),
    ]
    expected = logits.clone()
    for position, ids in zip(positions, allowed, strict=True):
        for token_id in range(vocab_size):
            if token_id not in ids:
                expected[position, token_id] = -torch.inf
    apply_token_masks(logits, torch.tensor(positions), torch.from_numpy(words_of(allowed, vocab_size)))
    assert torch.equal(logits, expected)


def sampler(vocab_size: int, *params: SamplingParams) -> Sampler:
    registry = KernelRegistry()
    register_native(registry)
    made = Sampler(vocab_size, len(params), registry.bind_ops({}, None))
    for row, one in enumerate(params):
        made.add(row, one, seed=row, num_prompt_tokens=1, stop_ids=frozenset({7}))
    return made


def test_a_masked_row_gets_an_allowed_token_and_the_others_what_they_get_without_it() -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=1, top_k=2, logit_bias={5: 50}),
        SamplingParams(temperature=0, repetition_penalty=1.3),
    ]
    made = sampler(40, *params)
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    history, count = np.full((4, 8), 3, np.int32), np.full(4, 2, np.int32)
    rows = np.array([2, 0, 3, 1])
    plain = made.sample(logits, rows, history, count).token_ids.tolist()
    masks = TokenMasks(np.array([0, 2]), words_of([[33, 34], [11]], 40))
    found = made.sample(logits, rows, history, count, masks)
    assert torch.equal(logits, before)
    assert found.token_ids[0] in (33, 34)
    assert found.token_ids[2] == 11
    assert [found.token_ids[1], found.token_ids[3]] == [plain[1], plain[3]]
    assert found.invalid_rows == ()


def test_masks_that_contradict_leave_no_token_and_only_that_row_is_told_of() -> None:
    params = [SamplingParams(temperature=0, allowed_token_ids=[1, 2]), SamplingParams(temperature=0, min_tokens=5)]
    made = sampler(40, *params)
    history, count = np.zeros((2, 8), np.int32), np.full(2, 1, np.int32)
    masks = TokenMasks(np.array([0, 1]), words_of([[3], [7, 9]], 40))
    found = made.sample(torch.zeros(2, 40), np.array([0, 1]), history, count, masks)
    assert found.invalid_rows == (0,)
    assert found.token_ids[1] == 9  # 7 ends the text, and may not yet


def test_masks_are_found_by_request() -> None:
    words = {"b": np.array([1, 2], np.int32), "gone": np.array([3, 4], np.int32), "c": np.array([5, 6], np.int32)}
    found = masks_of(["c", "a", "b"], words)
    assert found is not None
    assert found.positions.tolist() == [0, 2]
    assert found.words.tolist() == [[5, 6], [1, 2]]
    assert masks_of(["a"], words) is None
