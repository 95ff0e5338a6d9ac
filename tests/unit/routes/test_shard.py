"""MegatronShard against a plain reference, written from the definition with lists."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebus.consumers.reader.batch import RouteBatch, Shape, build_batch
from moebus.consumers.reader.shard import ContextLayout, MegatronShard, stage_layers
from moebus.schemas.errors import InvalidInput
from tests.support.routes import CARD
from tests.unit.routes.test_batch import SHAPE, rollout


def reference(lengths: list[int], shard: MegatronShard) -> list[int]:
    """The rows of one rank. Zigzag: pad every sequence, cut it, deal it out; join, pad. Contiguous: join, pad, cut.
    Then cut for the tensor ranks."""
    multiple = math.lcm(shard.pad_multiple, shard.tp_size) if shard.sequence_parallel else shard.pad_multiple
    mine: list[int] = []
    if shard.layout == "contiguous" or shard.cp_size == 1:
        everything = list(range(sum(lengths)))
        while len(everything) % (shard.cp_size * multiple):
            everything.append(-1)
        size = len(everything) // shard.cp_size
        mine = everything[shard.cp_rank * size : (shard.cp_rank + 1) * size]
    else:
        row = 0
        for length in lengths:
            sequence = list(range(row, row + length))
            row += length
            while len(sequence) % (2 * shard.cp_size):
                sequence.append(-1)
            size = len(sequence) // (2 * shard.cp_size)
            for take in (shard.cp_rank, 2 * shard.cp_size - 1 - shard.cp_rank):
                mine += sequence[take * size : (take + 1) * size]
        while len(mine) % multiple:
            mine.append(-1)
    if shard.sequence_parallel:
        size = len(mine) // shard.tp_size
        mine = mine[shard.tp_rank * size : (shard.tp_rank + 1) * size]
    return mine


def batch_of(lengths: list[int]) -> RouteBatch:
    found = [rollout(length, seed) for seed, length in enumerate(lengths, 1)]
    return build_batch([one.ref for one in found], found, SHAPE)


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(0, 23), min_size=0, max_size=4),
    cp=st.integers(1, 4),
    tp=st.integers(1, 4),
    sequence_parallel=st.booleans(),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    multiple=st.sampled_from([1, 4, 6]),
)
def test_every_rank_has_what_the_definition_says(
    lengths: list[int], cp: int, tp: int, sequence_parallel: bool, layout: ContextLayout, multiple: int
) -> None:
    seen: list[int] = []
    for c, t in product(range(cp), range(tp)):
        shard = MegatronShard(c, cp, t, tp, sequence_parallel, layout, multiple)
        rows = shard.rows(lengths).tolist()
        assert rows == reference(lengths, shard)
        assert sum(shard.local_lengths(lengths)) <= len(rows) * (tp if sequence_parallel else 1)
        if sequence_parallel or t == 0:
            seen += [row for row in rows if row >= 0]
    assert sorted(seen) == list(range(sum(lengths)))  # every token on exactly one rank


def test_zigzag_by_hand() -> None:
    # 8 tokens over 2 ranks: pieces of 2; rank 0 has the first and the last, rank 1 the two between
    assert MegatronShard(0, 2).rows([8]).tolist() == [0, 1, 6, 7]
    assert MegatronShard(1, 2).rows([8]).tolist() == [2, 3, 4, 5]
    assert MegatronShard(0, 2).rows([6, 3]).tolist() == [0, 1, -1, -1, 6, -1]
    halves = [MegatronShard(0, 2, t, 2, sequence_parallel=True).rows([8]).tolist() for t in (0, 1)]
    assert halves == [[0, 1], [6, 7]]
    assert MegatronShard(0, 1, 1, 2).rows([5]).tolist() == [0, 1, 2, 3, 4]  # without sequence parallel: all of it


def test_contiguous_by_hand() -> None:
    # packed sequences of 8 and 16 tokens over 2 ranks: each has 12 in a row, whatever sequences they are of
    ranks = [MegatronShard(rank, 2, layout="contiguous") for rank in (0, 1)]
    assert [rank.rows([8, 16]).tolist() for rank in ranks] == [list(range(12)), list(range(12, 24))]
    assert [rank.local_lengths([8, 16]) for rank in ranks] == [[8, 4], [0, 12]]
    # 6 tokens, room for 8: the padding is all at the end
    padded = [MegatronShard(rank, 2, layout="contiguous", pad_multiple=4) for rank in (0, 1)]
    assert [rank.rows([6]).tolist() for rank in padded] == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert [rank.local_lengths([6]) for rank in padded] == [[4], [2]]
    halves = [MegatronShard(1, 2, t, 2, sequence_parallel=True, layout="contiguous").rows([7]).tolist() for t in (0, 1)]
    assert halves == [[4, 5], [6, -1]]
    assert ranks[1].rows([]).tolist() == ranks[1].rows([0, 0]).tolist() == []


def test_the_shard_of_a_batch_holds_these_rows() -> None:
    batch = batch_of([5, 9])
    shard = MegatronShard(1, 2, 0, 2, sequence_parallel=True)
    cut = batch.shard(shard, layers=[5, 1])
    rows = reference([5, 9], shard)
    assert cut.rows.tolist() == rows
    assert cut.layers == (5, 1)
    assert cut.cu_seqlens.tolist() == [0, 4, 10]
    there = [index for index, row in enumerate(rows) if row >= 0]
    assert cut.valid.tolist() == [row >= 0 for row in rows]
    want = batch.routes[[rows[index] for index in there]][:, [2, 0]]
    assert np.array_equal(cut.routes[there], want)
    five, one = cut.per_router([5, 1])
    assert five.dtype == np.int64
    assert np.array_equal(five, cut.routes[:, 0])
    assert np.array_equal(one, cut.routes[:, 1])
    ordered = np.sort(cut.routes, axis=-1)
    assert int(cut.routes.max()) < CARD.num_experts
    assert not (ordered[..., 1:] == ordered[..., :-1]).any()  # padding holds legal ids too


def test_rows_without_routes_stay_so() -> None:
    one = rollout(3)
    batch = build_batch([one.ref], [one], SHAPE, [4])
    assert batch.shard(MegatronShard()).valid.tolist() == [True, True, True, False]


def test_layers_that_a_batch_does_not_hold() -> None:
    with pytest.raises(InvalidInput, match="layer 3 is not in the batch"):
        batch_of([2]).shard(MegatronShard(), layers=[3])
    with pytest.raises(InvalidInput, match="layer 1 is not in the shard"):
        batch_of([2]).shard(MegatronShard(), layers=[2]).per_router([1])
    assert batch_of([]).shard(MegatronShard(0, 2)).routes.shape == (0, 3, 2)


def test_pipeline_stages_by_global_layer_number() -> None:
    moe = tuple(range(3, 12))  # three dense layers in front
    assert [stage_layers(moe, 12, rank, 4) for rank in range(4)] == [[()], [(3, 4, 5)], [(6, 7, 8)], [(9, 10, 11)]]
    assert stage_layers(moe, 12, 1, 2, vp_size=3) == [(3,), (6, 7), (10, 11)]
    everything = sorted(
        layer for rank in range(2) for chunk in stage_layers(moe, 12, rank, 2, vp_size=3) for layer in chunk
    )
    assert everything == list(moe)
    with pytest.raises(InvalidInput, match="do not divide"):
        stage_layers(moe, 13, 0, 4)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"cp_rank": 2, "cp_size": 2}, "cp_rank"),
        ({"tp_rank": -1}, "tp_rank"),
        ({"cp_size": 0}, "cp_size"),
        ({"layout": "ring"}, "layout"),
        ({"pad_multiple": 0}, "pad_multiple"),
    ],
)
def test_a_place_that_is_none(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        MegatronShard(**arguments)


def test_a_stage_of_a_batch_that_was_read_for_it_alone() -> None:
    one = rollout(4)
    batch = build_batch([one.ref], [one], Shape((5,), 2, 16))
    assert np.array_equal(batch.shard(MegatronShard(), layers=[5]).routes, one.routes[:, 2:])
