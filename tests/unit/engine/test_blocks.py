"""The block pool and the prefix cache over it."""

from __future__ import annotations

import random

import pytest

from moebus.engine.paddle.blocks import BlockPool, chain_key

TOKENS = list(range(100, 120))


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """A sequence that computed all of `tokens` and offered its full blocks; it still uses them."""
    blocks, keys = pool.match([*tokens, 0])
    fresh = pool.allocate(-(-len(tokens) // pool.block_size) - len(blocks))
    assert fresh is not None
    blocks += fresh
    parent = keys[-1] if keys else pool.root
    for index in range(len(keys), len(tokens) // pool.block_size):
        parent = chain_key(parent, tokens[index * pool.block_size : (index + 1) * pool.block_size])
        pool.register(blocks[index], parent)
    return blocks


def test_a_prefix_is_hit_up_to_the_token_before_the_last() -> None:
    pool = BlockPool(10, 4, "v1")
    blocks = fill(pool, TOKENS[:12])
    assert pool.match(TOKENS[:12])[0] == blocks[:2]  # all of 12 would leave nothing to forward
    assert pool.match(TOKENS[:13])[0] == blocks
    assert pool.match(TOKENS[:4])[0] == []
    assert pool.match([1, *TOKENS])[0] == []
    assert pool.match([*TOKENS[:8], 1, 2, 3, 4, 5])[0] == blocks[:2]


def test_a_block_is_hit_only_after_the_same_prefix() -> None:
    pool = BlockPool(10, 4, "v1")
    fill(pool, TOKENS[:8])
    assert pool.match([*TOKENS[4:8], 1])[0] == []


def test_another_salt_hits_nothing() -> None:
    pool = BlockPool(10, 4, "v1")
    pool.release(fill(pool, TOKENS[:8]))
    assert pool.reset("v2") == 2
    assert pool.match(TOKENS)[0] == []
    assert pool.available == 10
    assert pool.reset("v2") == 0


def test_a_reset_changes_the_root_even_with_the_same_salt() -> None:
    pool = BlockPool(2, 4, "v1")
    before = pool.root
    pool.reset("v1")
    assert pool.root != before


def test_blocks_in_use_survive_a_reset_and_are_free_after() -> None:
    pool = BlockPool(4, 4, "v1")
    blocks = fill(pool, TOKENS[:8])
    pool.reset("v2")
    assert pool.available == 2
    pool.release(blocks)
    assert pool.available == 4
    assert pool.match(TOKENS)[0] == []


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(4, 4, "v1")
    pool.release(fill(pool, TOKENS[:8]))
    assert pool.allocate(5) is None
    assert pool.available == 4
    assert len(pool.match(TOKENS)[0]) == 2


def test_the_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    pool = BlockPool(4, 4, "v1")
    old, new = [1] * 8, [2] * 8
    pool.release(fill(pool, old))
    pool.release(fill(pool, new))
    assert pool.allocate(1) is not None
    assert pool.evictions == 1
    hit, _ = pool.match([*old, 0])
    assert len(hit) == 1
    pool.release(hit)
    hit, _ = pool.match([*new, 0])
    assert len(hit) == 2


def test_used_blocks_are_not_evicted() -> None:
    pool = BlockPool(3, 4, "v1")
    used = fill(pool, TOKENS[:8])
    assert pool.allocate(2) is None
    assert pool.match(TOKENS[:9])[0] == used


def test_a_generation_ends_with_the_content() -> None:
    pool = BlockPool(1, 4, "v1")
    (block,) = fill(pool, TOKENS[:4])
    first = pool.generation(block)
    pool.release([block])
    assert pool.match(TOKENS[:5])[0] == [block]
    assert pool.generation(block) == first
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert pool.generation(block) > first


def test_a_block_released_too_often_is_a_bug() -> None:
    pool = BlockPool(1, 4, "v1")
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_leaks_nothing_and_never_hits_a_wrong_prefix(seed: int) -> None:
    draw = random.Random(seed)
    pool = BlockPool(12, 2, "v")
    contents: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> generation, the prefix up to its end
    running: list[list[int]] = []
    for _ in range(400):
        if running and (draw.random() < 0.4 or pool.available < 6):
            pool.release(running.pop(draw.randrange(len(running))))
            continue
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
        hit, _ = pool.match([*tokens, 9])
        for index, block in enumerate(hit):
            assert contents[block] == (pool.generation(block), tuple(tokens[: (index + 1) * 2]))
        pool.release(hit)
        blocks = fill(pool, tokens)
        for index in range(len(tokens) // 2):
            contents[blocks[index]] = (pool.generation(blocks[index]), tuple(tokens[: (index + 1) * 2]))
        running.append(blocks)
        if draw.random() < 0.02:
            pool.reset("v")
            contents.clear()
    for blocks in running:
        pool.release(blocks)
    assert pool.available == pool.total == 12
    assert pool.evictions > 0
