"""A6: requests share cached blocks only if everything that their keys and values depend on is the same.

The report is of two adapters of one name with different weights. There are no adapters in the engine yet, so nothing
here runs one: what is tested is what they will rest on, `Request.cache_keys`, where an adapter stands with the id of
its weights, never with its name. The kind itself is tested through the whole engine with the key that a user has
today, the salt.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, Solo, greedy, random_prompt, run, seeded, token_ids
from isthmus import SamplingParams
from isthmus.scheduler.block_group import BlockGroup
from isthmus.scheduler.kv_cache_manager import KVCacheManager
from isthmus.scheduler.request import Request

BLOCK = 16
PROMPT = random_prompt(64, seed=1)
"""Four blocks, of which a second request may use three."""
Keys = Mapping[str, str]


def manager() -> KVCacheManager:
    return KVCacheManager([BlockGroup(128, BLOCK)], hash_seed=0)


def request(keys: Keys | None, *, salt: str | None = None, tokens: Sequence[int] = PROMPT) -> Request:
    return Request("r", tokens, SamplingParams(cache_salt=salt), cache_keys=keys)


def num_cached(kv: KVCacheManager, one: Request) -> int:
    """How much of it was there; then it is computed, and its blocks are free."""
    hit = kv.lookup(one)
    assert kv.allocate(one, one.num_tokens - hit.num_cached_tokens, hit) is not None
    kv.publish(one, one.num_tokens)
    kv.free(one)
    return hit.num_cached_tokens


def test_as_reported_at_the_keys() -> None:
    """Both adapters are named "a"; the name is nowhere in a key."""
    kv = manager()
    by_id = {1: {"adapter": "1"}, 2: {"adapter": "2"}}
    assert [num_cached(kv, request(keys)) for keys in (by_id[1], by_id[2], None, by_id[1])] == [0, 0, 0, 48]


DIFFERENT: list[Keys] = [
    {},
    {"adapter": "1"},
    {"adapter": "2"},
    {"adapter": "12"},
    {"adapter": ""},
    {"salt": "1"},
    {"salt": "adapter1"},
    {"salt": "1", "adapter": "1"},
    {"salt": "1", "adapter": "2"},
    {"salt": "2", "adapter": "1"},
    {"salt": "1adapter1"},
    {"salt": "1", "image": "1"},
    {"adapter": "1", "image": "1"},
    {"adapter": "1image1"},
    {"a": "bc"},
    {"ab": "c"},
    {"abc": ""},
    {"a": "b", "c": ""},
    {"a": "", "bc": ""},
    {"a": "b\0c"},
    {"a": "b", "\0c": ""},
    {"adapter": "1", "salt": "\x05\0\0\0\0\0\0\0image"},
    {"salt": "ä"},
    {"salt": "a\u0308"},
    {"salt": "\ud800"},
    {"salt": "\udc00"},
    {"salt": "?"},
]
"""Some of them spell the same text, or the same bytes as a length and a text, once they are put together; some are half
a character, as JSON allows it.
"""


def test_no_two_sets_of_keys_are_taken_for_one_another() -> None:
    kv = manager()
    first_hash = {}
    for keys in DIFFERENT:
        one = request(keys)
        assert num_cached(kv, one) == 0, keys
        first_hash[one.block_hashes[0]] = keys
    assert len(first_hash) == len(DIFFERENT)


@pytest.mark.parametrize("keys", DIFFERENT, ids=repr)
def test_the_same_keys_are_found_again(keys: Keys) -> None:
    """Whatever the order in which they were given."""
    kv = manager()
    for other in DIFFERENT:
        num_cached(kv, request(other))
    assert num_cached(kv, request(keys)) == 48
    assert num_cached(kv, request(dict(reversed(list(keys.items()))))) == 48


def test_keys_are_in_every_block_and_not_in_the_first_alone() -> None:
    """Chained hashes: no block of one is found under the other's keys, at any depth."""
    kv = manager()
    for one, other in itertools.permutations([{}, {"adapter": "1"}, {"salt": "x"}], 2):
        hashes = [set(kv._hashes(request(keys), 4)) for keys in (one, other)]
        assert [len(found) for found in hashes] == [4, 4]
        assert not hashes[0] & hashes[1]


def test_a_salt_of_the_user_is_the_key_of_its_kind() -> None:
    kv = manager()
    assert num_cached(kv, request(None, salt="x")) == 0
    assert num_cached(kv, request({"salt": "x"})) == 48
    assert num_cached(kv, request({"adapter": "x"})) == 0
    assert num_cached(kv, request({"adapter": "x"}, salt="x")) == 0


def test_siblings_have_the_keys_of_their_leader() -> None:
    kv = manager()
    leader = request({"adapter": "1"}, salt="x")
    num_cached(kv, leader)
    follower = leader.sibling("r#1", seed=1)
    assert num_cached(kv, follower) == 48
    assert follower.block_hashes == leader.block_hashes


def test_every_group_of_layers_keeps_keys_apart() -> None:
    kv = KVCacheManager([BlockGroup(64, BLOCK), BlockGroup(64, BLOCK, window=20, most_tokens=64)], hash_seed=0)
    found = [num_cached(kv, request(keys)) for keys in ({"adapter": "1"}, {"adapter": "2"}, {"adapter": "1"})]
    assert found == [0, 0, 48]


# Through the engine.


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("params", [greedy(6), seeded(6)], ids=["greedy", "seeded"])
def test_salts_in_turns(
    params: SamplingParams, streamed: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """The order of the report. The model has no second set of weights, so the answers are all alike here, and right."""
    llm = make_llm(tiny_llama, block_size=BLOCK)
    cached = []
    for salt in ("1", "\ud800", None, "1", "\ud800", None):
        output = run(llm, PROMPT, with_salt(params, salt), streamed=streamed)
        assert token_ids(output) == solo(tiny_llama, PROMPT, params)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 48, 48, 48]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_blocks": 12, "preemption_mode": "recompute"},
        {"num_blocks": 12, "preemption_mode": "swap", "swap_space_gib": 0.01},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 20, "max_num_seqs": 8},
    ],
    ids=["roomy", "recompute", "swap", "ahead", "chunks"],
)
def test_salts_in_one_batch(settings: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """Side by side, each pair of one salt may share and no others: of each salt the first one finds nothing."""
    llm = make_llm(tiny_llama, block_size=BLOCK, **settings)
    salts = ["a", "b", None, "ab", "a", "b", None, "ab"]
    params = [with_salt(greedy(20), salt) for salt in salts]
    outputs = llm.generate([PROMPT] * len(salts), params, progress=False)
    assert [token_ids(output) for output in outputs] == [solo(tiny_llama, PROMPT, greedy(20))] * len(salts)
    assert [output.num_cached_tokens for output in outputs[:4]] == [0] * 4


def test_a_salt_on_the_host_is_as_good_as_on_the_device(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """Blocks that the device gave up come back to their own salt only."""
    llm = make_llm(tiny_llama, block_size=BLOCK, num_blocks=6, swap_space_gib=0.01)
    stats = llm._core.scheduler.stats
    cached = []
    for salt in ("1", "2", "3", "1", "4"):
        output = run(llm, PROMPT, greedy(6, cache_salt=salt), streamed=False)
        assert token_ids(output) == solo(tiny_llama, PROMPT, greedy(6))
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 48, 0]
    assert stats.host_prefix_hits > 0


def with_salt(params: SamplingParams, salt: str | None) -> SamplingParams:
    make = greedy if params.is_greedy else seeded
    return make(params.max_tokens or 1, cache_salt=salt)
