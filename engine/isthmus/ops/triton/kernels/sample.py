"""The `sample` op of `isthmus.ops.sampling`: the same token as there, whatever the tiles and the device.

How far a logit lies below the row's largest, over the temperature, orders tokens by likelihood, and so do its bits as
an integer: the token's key. Filters are limits of keys, found by bisection, and of tokens with the limit's own key the
lower ids stay. Weights are integers, so their sums do not depend on an order. What is left is a weight's few sums and
products of float32: a launch must say `enable_fp_fusion=False`, since a fused product makes another weight.
"""

import triton
import triton.language as tl

from isthmus.ops import sampling

INFINITY_KEY: tl.constexpr = tl.constexpr(0x7F800000)
KEY_BITS: tl.constexpr = tl.constexpr(31)
LOG2_E: tl.constexpr = tl.constexpr(-sampling.NEGATIVE_LOG2_E)
MAX_HALVINGS: tl.constexpr = tl.constexpr(sampling.MAX_HALVINGS)
HEAVIEST: tl.constexpr = tl.constexpr(2.0**sampling.WEIGHT_BITS)
EXP2_5: tl.constexpr = tl.constexpr(sampling.EXP2[0])
EXP2_4: tl.constexpr = tl.constexpr(sampling.EXP2[1])
EXP2_3: tl.constexpr = tl.constexpr(sampling.EXP2[2])
EXP2_2: tl.constexpr = tl.constexpr(sampling.EXP2[3])
EXP2_1: tl.constexpr = tl.constexpr(sampling.EXP2[4])
GAMMA: tl.constexpr = tl.constexpr(sampling.GAMMA % 2**64)
MIX_1: tl.constexpr = tl.constexpr(sampling.MIX_1 % 2**64)
MIX_2: tl.constexpr = tl.constexpr(sampling.MIX_2 % 2**64)


@triton.jit
def _uniform_bits(seeds):
    """52 random bits of each seed, as float64: `mix64(seeds + GAMMA) >> 12`."""
    x = seeds.to(tl.uint64) + GAMMA
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    x = x ^ (x >> 31)
    return (x >> 12).to(tl.int64).to(tl.float64)


@triton.jit
def _weight(below):
    """exp(-below) in units of 2**-WEIGHT_BITS, int64, step by step as the native one."""
    power = tl.minimum(below * LOG2_E, MAX_HALVINGS)
    halvings = tl.floor(power + 0.5)
    x = halvings - power
    exp2 = x * EXP2_5
    exp2 = (exp2 + EXP2_4) * x
    exp2 = (exp2 + EXP2_3) * x
    exp2 = (exp2 + EXP2_2) * x
    exp2 = (exp2 + EXP2_1) * x
    return ((exp2 + 1.0) * HEAVIEST).to(tl.int64) >> halvings.to(tl.int64)


@triton.jit
def _below_largest(logits, is_row, start, largest, temperature, lowest, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Of ids [start, start + BLOCK): how far they lie below the row's largest, and their keys [ROWS, BLOCK].

    Infinitely far what min_p drops, and what lies outside of the row.
    """
    column = start + tl.arange(0, BLOCK)
    logit = tl.load(logits + column[None, :], is_row[:, None] & (column < WIDTH)[None, :], float("-inf"))
    below = tl.div_rn(largest[:, None] - logit, tl.broadcast_to(temperature[:, None], logit.shape))
    below = tl.where(below > lowest[:, None], float("inf"), below)
    return below, below.to(tl.int32, bitcast=True)


@triton.jit
def _before(
    logits, is_row, largest, temperature, lowest, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Number, int32, and weight, int64, of the tokens whose keys lie below `limit`; all [ROWS]."""
    count = tl.zeros([ROWS], tl.int32)
    weight = tl.zeros([ROWS], tl.int64)
    for start in tl.range(0, WIDTH, BLOCK):
        below, key = _below_largest(logits, is_row, start, largest, temperature, lowest, WIDTH, BLOCK)
        is_before = key < limit[:, None]
        count += tl.sum(is_before.to(tl.int32), 1)
        weight += tl.sum(tl.where(is_before, _weight(below), 0), 1)
    return count, weight


@triton.jit
def _limit(
    logits, is_row, largest, temperature, lowest, goal, high, BY_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The lowest key up to which the tokens' number, or weight, reaches `goal` [ROWS]. Up to `high` [ROWS] it does."""
    low = tl.zeros([ROWS], tl.int32)
    for _ in tl.range(0, KEY_BITS):
        middle = low + (high - low) // 2
        count, weight = _before(logits, is_row, largest, temperature, lowest, middle + 1, WIDTH, BLOCK, ROWS)
        is_reached = weight >= goal if BY_WEIGHT else count >= goal
        low = tl.where(is_reached, low, middle + 1)
        high = tl.where(is_reached, middle, high)
    return high


@triton.jit(do_not_specialize=["num_rows"])
def sample_kernel(
    out_ptr,  # int64 [R]
    logits_ptr,  # float32 [R, WIDTH]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int64 [R]; TOP_K only
    top_p_ptr,  # float32 [R]; TOP_P only
    lowest_ptr,  # float32 [R], log(min_p); MIN_P only
    seeds_ptr,  # int64 [R]
    num_rows,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    logits = logits_ptr + row.to(tl.int64)[:, None] * stride

    # The largest logit, and the lowest of the ids that have it.
    largest_of_lane = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    start_of_lane = tl.zeros([ROWS, BLOCK], tl.int32)
    column = tl.arange(0, BLOCK)
    for start in tl.range(0, WIDTH, BLOCK):
        mask = is_row[:, None] & (start + column < WIDTH)[None, :]
        logit = tl.load(logits + (start + column)[None, :], mask=mask, other=float("-inf"))
        start_of_lane = tl.where(logit > largest_of_lane, start, start_of_lane)
        largest_of_lane = tl.maximum(largest_of_lane, logit)
    largest = tl.max(largest_of_lane, 1)
    is_largest = largest_of_lane == largest[:, None]
    greedy = tl.min(tl.where(is_largest, start_of_lane + column[None, :], WIDTH - 1), 1)

    temperature = tl.load(temperature_ptr + row, mask=is_row, other=0.0)
    is_random = temperature > 0.0
    token = greedy
    if tl.max(is_random.to(tl.int32), 0) > 0:
        temperature = tl.where(is_random, temperature, 1.0)
        lowest = tl.full([ROWS], float("inf"), tl.float32)
        if MIN_P:
            lowest = -tl.load(lowest_ptr + row, mask=is_row, other=float("-inf"))

        # Kept are the tokens before `limit`, and of those at it `room`, the lower ids first.
        limit = tl.full([ROWS], INFINITY_KEY, tl.int32)
        count = tl.full([ROWS], WIDTH, tl.int32)
        if TOP_K:
            top_k = tl.load(top_k_ptr + row, mask=is_row, other=0)
            count = tl.where((top_k > 0) & (top_k < WIDTH), top_k, WIDTH).to(tl.int32)
            limit = _limit(
                logits, is_row, largest, temperature, lowest, count, limit, False, WIDTH, BLOCK, ROWS
            )  # fmt: skip
        num_before, before = _before(logits, is_row, largest, temperature, lowest, limit, WIDTH, BLOCK, ROWS)
        at_limit = _weight(limit.to(tl.float32, bitcast=True))
        room = count - num_before
        total = before + room * at_limit
        if TOP_P:
            top_p = tl.load(top_p_ptr + row, mask=is_row, other=1.0)
            goal = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
            # A row that keeps all of them keeps those that weigh something: no other is ever drawn.
            goal = tl.maximum(tl.where(top_p < 1.0, goal, total), 1)
            limit = _limit(
                logits, is_row, largest, temperature, lowest, goal, limit, True, WIDTH, BLOCK, ROWS
            )  # fmt: skip
            _, before = _before(logits, is_row, largest, temperature, lowest, limit, WIDTH, BLOCK, ROWS)
            at_limit = _weight(limit.to(tl.float32, bitcast=True))
            room = tl.cdiv(goal - before, tl.maximum(at_limit, 1)).to(tl.int32)
            total = before + room * at_limit

        # The first id up to which the weight of what is kept exceeds `target`.
        seeds = tl.load(seeds_ptr + row, mask=is_row, other=0)
        share = _uniform_bits(seeds) * 2.220446049250313e-16  # 2**-52
        target = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
        drawn = tl.zeros([ROWS], tl.int32)
        passed = tl.zeros([ROWS], tl.int64)
        for start in tl.range(0, WIDTH, BLOCK):
            below, key = _below_largest(logits, is_row, start, largest, temperature, lowest, WIDTH, BLOCK)
            weight = tl.where(key < limit[:, None], _weight(below), 0)
            is_tie = key == limit[:, None]
            num_ties = tl.sum(is_tie.to(tl.int32), 1)
            here = tl.sum(weight, 1) + tl.minimum(num_ties, room) * at_limit
            is_here = (passed <= target) & (target < passed + here)
            if tl.max(is_here.to(tl.int32), 0) > 0:
                is_kept = is_tie & (tl.cumsum(is_tie.to(tl.int32), 1) <= room[:, None])
                weight = tl.where(is_kept, at_limit[:, None], weight)
                is_passed = passed[:, None] + tl.cumsum(weight, 1) <= target[:, None]
                drawn = tl.where(is_here, start + tl.sum(is_passed.to(tl.int32), 1), drawn)
            passed += here
            room = tl.maximum(room - num_ties, 0)
        token = tl.where(is_random, drawn, greedy)
    tl.store(out_ptr + row, token.to(tl.int64), mask=is_row)
