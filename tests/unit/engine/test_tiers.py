"""The two tiers of the prefix cache: what goes down, what comes back, and that no wrong prefix is ever hit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from moebus.engine.paddle.blocks import Evicted, chain_key
from moebus.engine.paddle.tiers import CacheTiers
from moebus.engine.port import Deadline
from tests.support.deadlines import Left, Polls
from tests.support.gate import Gate
from tests.support.wait import wait_until

SIZE = 4


class Memory:
    """A BlockCopier over a dict. A block's content is the prefix it ends."""

    def __init__(self) -> None:
        self.device: dict[int, tuple[int, ...]] = {}
        self.restored: list[tuple[int, int]] = []
        self.fail = ""

    def export(self, evicted: Sequence[Evicted]) -> object:
        if self.fail == "export":
            raise MemoryError("planned")
        return [self.device.pop(one.block) for one in evicted]

    def fetch(self, exported: object) -> Sequence[tuple[int, ...]]:
        if self.fail == "fetch":
            raise MemoryError("planned")
        assert isinstance(exported, list)
        return exported

    def restore(self, block: int, generation: int, content: tuple[int, ...]) -> None:
        if self.fail == "restore":
            raise MemoryError("planned")
        self.device[block] = content
        self.restored.append((block, generation))


class World:
    """Tiers over a Memory; `run` is a sequence that computes its prompt, offers its blocks and ends."""

    def __init__(self, blocks: int, cpu_blocks: int, gate: Gate | None = None) -> None:
        self.memory = Memory()
        self.gate = gate or Gate()
        self.tiers: CacheTiers[tuple[int, ...]] = CacheTiers(
            blocks, SIZE, "v1", self.memory, cpu_blocks=cpu_blocks, hook=self.gate
        )

    def run(self, tokens: Sequence[int]) -> int:
        """Tokens found in the cache, after checking that every cached block holds what it should."""
        taken = self.tiers.take(tokens, len(tokens))
        assert taken is not None
        cached = len(taken.keys) * SIZE
        for index, block in enumerate(taken.blocks[: len(taken.keys)]):
            assert self.memory.device[block] == tuple(tokens[: (index + 1) * SIZE])
        parent = taken.keys[-1] if taken.keys else self.tiers.pool.root
        for index in range(len(taken.keys), len(tokens) // SIZE):
            parent = chain_key(parent, tokens[index * SIZE : (index + 1) * SIZE])
            self.memory.device[taken.blocks[index]] = tuple(tokens[: (index + 1) * SIZE])
            self.tiers.pool.register(taken.blocks[index], parent)
        self.tiers.pool.release(taken.blocks)
        return cached

    def settle(self) -> None:
        wait_until(lambda: self.tiers.drain(Left()) is None or not self._in_flight(), what="swaps at rest")

    def _in_flight(self) -> int:
        seen = self.tiers.participant(paused=False)
        return 0 if seen is None else seen.in_flight


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.gate.open()
        world.tiers.close(30)


def new(worlds: list[World], blocks: int, cpu_blocks: int) -> World:
    worlds.append(World(blocks, cpu_blocks))
    return worlds[-1]


OLD, OTHER = [*range(17)], [*range(100, 117)]  # four full blocks and one token more


def test_what_the_device_evicts_comes_back_from_the_host(worlds: list[World]) -> None:
    world = new(worlds, 5, 8)
    assert world.run(OLD) == 0
    assert world.run(OTHER) == 0
    world.settle()
    assert world.tiers.pool.evictions == 4
    assert (len(world.tiers.host), world.tiers.swapped_out) == (4, 4)
    assert world.run(OLD) == 16
    assert world.tiers.swapped_in == 4
    assert len(world.memory.restored) == 4
    assert all(world.tiers.pool.generation(block) == generation for block, generation in world.memory.restored)
    assert world.tiers.pool.available == 5


def test_a_prefix_may_lie_in_both_tiers(worlds: list[World]) -> None:
    world = new(worlds, 6, 8)
    world.run(OLD)
    world.run(OTHER[:13])  # needs four: two free ones, and the tail of OLD
    world.settle()
    assert len(world.tiers.host) == 2
    assert world.run(OLD) == 16
    assert world.tiers.swapped_in == 2


def test_without_a_host_tier_nothing_is_copied(worlds: list[World]) -> None:
    world = new(worlds, 5, 0)
    world.run(OLD)
    world.run(OTHER)
    assert world.run(OLD) == 0
    assert world.memory.restored == []
    assert world.tiers.participant(paused=True) is None
    assert world.tiers.drain(Left()) is None


def test_the_host_tier_forgets_the_least_recently_used(worlds: list[World]) -> None:
    world = new(worlds, 5, 3)
    world.run(OLD)
    world.run(OTHER)
    world.settle()
    assert len(world.tiers.host) == 3
    # the tail left the device first, so the last block to arrive is the head
    assert world.run(OLD) == 12


def test_a_block_that_is_there_already_is_not_copied_again(worlds: list[World]) -> None:
    world = new(worlds, 5, 16)
    for _ in range(3):
        for tokens in (OLD, OTHER):
            world.run(tokens)
            world.settle()
    assert world.tiers.swapped_out == 8
    assert world.tiers.swapped_in == 16


def test_a_reset_empties_both_tiers_and_what_is_on_its_way(worlds: list[World]) -> None:
    world = new(worlds, 5, 8)
    world.run(OLD)
    world.run(OTHER)
    world.settle()
    world.gate.close_after("swap_out", 0)
    world.run(OLD[::-1])
    world.gate.wait_held()
    assert world.tiers.reset("v2") == 4 + 4
    world.gate.open()
    world.settle()
    assert len(world.tiers.host) == 0
    assert world.run(OTHER) == 0


@pytest.mark.parametrize("where", ["export", "fetch", "restore"])
def test_a_copy_that_fails_is_a_miss(worlds: list[World], where: str) -> None:
    world = new(worlds, 5, 8)
    world.run(OLD)
    world.memory.fail = where if where != "restore" else ""
    world.run(OTHER)
    world.settle()
    world.memory.fail = where if where == "restore" else ""
    assert world.run(OLD) == 0
    assert world.tiers.pool.available == 5
    world.memory.fail = ""
    world.run(OTHER)
    world.settle()
    assert world.run(OLD) == 16


def test_too_few_blocks_take_nothing(worlds: list[World]) -> None:
    world = new(worlds, 5, 8)
    world.run(OLD)
    assert world.tiers.take(OLD, 24) is None
    assert world.tiers.pool.available == 5
    assert world.run(OLD) == 16


@pytest.mark.parametrize("deadline", [Polls(0), Polls(2)])
def test_swaps_at_the_deadline_are_cut_and_named(worlds: list[World], deadline: Deadline) -> None:
    world = new(worlds, 5, 8)
    world.run(OLD)
    keys = [key.hex() for key in world.tiers.pool.prefix_keys(OLD)]
    world.gate.close_after("swap_out", 0)
    world.run(OTHER)
    world.gate.wait_held()
    running = world.tiers.participant(paused=False)
    assert running is not None
    assert (running.in_flight, running.state, running.cut) == (4, "running", ())
    cut = world.tiers.drain(deadline)
    assert cut is not None
    assert (cut.name, cut.state, cut.in_flight, cut.finished) == ("cache_transfer", "paused", 0, 0)
    assert sorted(cut.cut) == sorted(keys)
    world.gate.open()
    world.settle()
    assert len(world.tiers.host) == 0
    assert world.run(OLD) == 0, "a block that was cut is computed again"


def test_swaps_before_the_deadline_finish(worlds: list[World]) -> None:
    world = new(worlds, 5, 8)
    world.run(OLD)
    world.run(OTHER)
    seen = world.tiers.drain(Left())
    assert seen is not None
    assert (seen.in_flight, seen.finished, seen.cut) == (0, 4, ())


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_hits_only_true_prefixes(worlds: list[World], seed: int) -> None:
    draw = random.Random(seed)
    world = new(worlds, 6, 10)
    hits = 0
    for _ in range(300):
        hits += world.run([draw.randrange(2) for _ in range(draw.randrange(1, 22))])
        if draw.random() < 0.05:
            world.settle()
        if draw.random() < 0.02:
            world.tiers.reset("v1")
    world.settle()
    assert hits > 0
    assert world.tiers.swapped_in > 0
    assert world.tiers.pool.available == 6
    assert len(world.tiers.host) <= 10
