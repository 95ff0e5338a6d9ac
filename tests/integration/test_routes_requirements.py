"""What `docs/routes-requirements.md` promises and no other test shows, through a broker in memory and a real store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import OutRecord
from moebus.broker.topics import Topics, ensure
from moebus.consumers import MegatronShard, Rollout, RoutingReader
from moebus.consumers.dlt import dead_letters
from moebus.consumers.reader import StoreUnreachable
from moebus.consumers.reader.ask import Query
from moebus.producers import RoutingPublisher
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Chunk, Header, decode, encode_attempt, unpack
from moebus.schemas.record.chunking import Outcome
from moebus.schemas.rollout import rollout_key
from moebus.schemas.route_errors import RouteCorrupt, RouteDeleted, RouteNeverComing, RouteNotYet, StoreCatchingUp
from moebus.schemas.route_ref import RouteRef
from tests.support.routes import CARD, attempt_id, make_routes, make_tokens
from tests.support.store_http import OPTIONS, serving
from tests.support.wait import wait_until

TOPICS = Topics("t")
WAIT = 30.0


@dataclass
class Fleet:
    """A log, one store, one reader; publishers as they are needed."""

    broker: MemoryBroker
    reader: RoutingReader
    url: str

    def publisher(self, card: ModelCard = CARD, run: str = "run", epoch: int = 0) -> RoutingPublisher:
        return RoutingPublisher(self.broker, TOPICS, run=run, card=card, epoch=epoch)

    def reads(self, run: str) -> RoutingReader:
        return RoutingReader(self.broker, TOPICS, run=run, stores=[self.url])


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    memory = MemoryBroker()
    ensure(memory.admin(), TOPICS, routes_partitions=4)
    options = replace(OPTIONS, map_bytes=256 << 20)
    with (
        serving(memory, TOPICS, tmp_path / "store", options=options) as http,
        RoutingReader(memory, TOPICS, run="run", stores=[http.url]) as reader,
    ):
        wait_until(lambda: _ready(reader), 30, "the store to be ready")
        yield Fleet(memory, reader, http.url)
    memory.close()


def _ready(reader: RoutingReader) -> bool:
    try:
        reader.page(limit=1)
    except (StoreUnreachable, StoreCatchingUp):
        return False
    return True


def positions(rows: int, layers: int, experts: int) -> RouteArray:
    """The position as the expert id: row i holds i in every layer."""
    ids = np.arange(rows, dtype=np.uint16) % experts
    return np.broadcast_to(ids[:, None, None], (rows, layers, 1)).copy()


def test_row_i_is_token_i_from_the_engine_to_the_router(fleet: Fleet) -> None:
    card = ModelCard(1000, 1, (3, 4, 7))
    with fleet.publisher(card) as publisher:
        ref = publisher.submit(positions(700, 3, 1000), "a:0:0:0", token_ids=make_tokens(701)).ref
    batch = fleet.reader.resolve([ref], [make_tokens(701)], wait=WAIT)
    for routed in batch.per_router([7, 3]):
        assert routed[:700, 0].tolist() == list(range(700))
    assert batch.valid.tolist() == [True] * 700 + [False]


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (384, "uint16"), (512, "uint16"), (70_000, "uint32")])
def test_any_number_of_experts(fleet: Fleet, experts: int, dtype: str) -> None:
    card = ModelCard(experts, 8, (1, 2))
    routes = make_routes(50, card)
    routes[0, 0] = np.arange(experts - 8, experts)
    with fleet.publisher(card) as publisher:
        ref = publisher.submit(routes, "a:0:0:0").ref
    found = fleet.reader.resolve([ref], wait=WAIT).routes
    assert found.dtype == np.dtype(dtype)
    assert np.array_equal(found, routes)


def test_a_rollout_of_131072_tokens_passes_whole(fleet: Fleet) -> None:
    card = ModelCard(128, 8, tuple(range(60)))
    rows = 131_071
    start = np.arange(rows, dtype=np.uint32)[:, None, None] * 7 + np.arange(60, dtype=np.uint32)[:, None]
    routes = ((start + np.arange(8, dtype=np.uint32)) % 128).astype(np.uint8)
    assert routes.nbytes > 62_000_000
    with fleet.publisher(card) as publisher:
        ref = publisher.submit(routes, "a:0:0:0").ref
    assert np.array_equal(fleet.reader.resolve([ref], wait=WAIT).routes, routes)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_rollout_of_no_row_and_of_one(fleet: Fleet, rows: int) -> None:
    with fleet.publisher() as publisher:
        ref = publisher.submit(make_routes(rows), "a:0:0:0", token_ids=make_tokens(rows + 1)).ref
    batch = fleet.reader.resolve([ref], [make_tokens(rows + 1)], wait=WAIT)
    assert batch.valid.tolist() == [True] * rows + [False]


def test_a_partial_rollout_goes_on_and_keeps_the_rows_it_had(fleet: Fleet) -> None:
    """Three segments under three versions, the second without a token: rows stay those that sampled their token."""
    tokens, routes = make_tokens(21), make_routes(20)
    again = make_routes(20, seed=9)  # what a re-prefill under newer weights would capture for the same tokens
    with fleet.publisher() as publisher:
        first = publisher.submit(
            routes[:12], "a:0:0:0", token_ids=tokens, versions=[(0, "v1")], status="partial", finish_reason="pause"
        )
        empty = publisher.submit(
            again[:12], "a:0:0:0", token_ids=tokens, base=first.ref, versions=[(0, "v2")], status="partial"
        )
        full = np.concatenate([again[:12], routes[12:]])
        last = publisher.submit(
            full, "a:0:0:0", token_ids=tokens, base=empty.ref, versions=[(0, "v1"), (12, "v3")], finish_reason="stop"
        )
        sizes = [one.result(WAIT).wire_bytes for one in (first, empty, last)]
    found = fleet.reader.get("a:0:0:0", attempt=last.ref.attempt, wait=WAIT)
    assert np.array_equal(found.routes, routes), "first capture wins"
    assert (found.status, found.versions) == ("complete", ((0, "v1"), (12, "v3")))
    assert sizes[1] < sizes[0]  # an END alone
    part = fleet.reader.get("a:0:0:0", attempt=first.ref.attempt)
    assert (part.status, part.finish_reason, part.ref.rows) == ("partial", "pause", 12)


def test_fifty_turns_cost_what_their_new_tokens_cost(fleet: Fleet) -> None:
    tokens, routes = make_tokens(5001), make_routes(5000)
    ref, sizes = None, []
    with fleet.publisher() as publisher:
        for turn in range(50):
            rows = 100 * (turn + 1)
            receipt = publisher.submit(routes[:rows], f"a:0:{turn}:0", token_ids=tokens, base=ref)
            ref = receipt.ref
            sizes.append(receipt.result(WAIT).wire_bytes)
    assert ref is not None
    assert max(sizes[1:]) - min(sizes[1:]) < 100
    assert sum(sizes) < 50 * (sizes[0] + 200)
    assert np.array_equal(fleet.reader.resolve([ref], wait=WAIT).routes, routes)


def test_ranks_that_read_their_share_read_a_rollout_once_in_all(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks (context 2, tensor 2 with sequence parallel, pipeline 2) and rollouts of several lengths."""
    sizes = (64, 7, 0, 1)
    tokens = [make_tokens(rows + 1, seed=rows) for rows in sizes]
    with fleet.publisher() as publisher:
        refs = [
            publisher.submit(make_routes(rows, seed=rows), f"d{rows}:0:0:0", token_ids=ids).ref
            for rows, ids in zip(sizes, tokens, strict=True)
        ]
    everything = fleet.reader.resolve(refs, tokens, wait=WAIT)
    read: list[int] = []
    fetch = fleet.reader._asker._fetch

    def counted(url: str, query: Query, wait: float) -> Rollout:
        found = fetch(url, query, wait)
        read.append(found.routes.nbytes)
        return found

    monkeypatch.setattr(fleet.reader._asker, "_fetch", counted)
    for cp_rank, tp_rank, stage in product((0, 1), (0, 1), ([1], [2, 5])):
        shard = MegatronShard(cp_rank, 2, tp_rank, 2, sequence_parallel=True)
        mine, want = fleet.reader.resolve_shard(refs, shard, tokens, layers=stage), everything.shard(shard, stage)
        assert mine.rows.tolist() == want.rows.tolist()
        assert mine.valid.tolist() == want.valid.tolist()
        assert np.array_equal(mine.routes[mine.valid], want.routes[want.valid])
        assert (mine.layers, mine.cu_seqlens.tolist()) == (tuple(stage), want.cu_seqlens.tolist())
        assert len(mine.per_router()) == len(stage)
    assert sum(read) == sum(sizes) * len(CARD.moe_layers) * CARD.top_k


def test_a_rank_without_rows_and_a_ref_that_does_not_fit(fleet: Fleet) -> None:
    with fleet.publisher() as publisher:
        ref = publisher.submit(make_routes(1), "a:0:0:0", token_ids=make_tokens(1)).ref
        none = publisher.submit(make_routes(0), "b:0:0:0").ref
    for refs in ([ref], [none, ref]):
        empty = fleet.reader.resolve_shard(refs, MegatronShard(1, 2, layout="contiguous"), wait=WAIT)
        assert empty.routes.shape[1:] == (3, 2)
        assert not empty.valid.any()
    assert fleet.reader.resolve_shard([], MegatronShard()).routes.shape[0] == 0
    longer = RouteRef("run", "a:0:0:0", 0, ref.attempt, 2)
    with pytest.raises(RouteCorrupt, match="the ref says"):
        fleet.reader.resolve_shard([longer], MegatronShard())
    with pytest.raises(InvalidInput, match="another run"):
        fleet.reader.resolve_shard([RouteRef("other", "a", 0, ref.attempt, 1)], MegatronShard())
    with pytest.raises(RouteNotYet):
        fleet.reader.resolve_shard([RouteRef("run", "c", 0, ref.attempt, 1)], MegatronShard())


def put(fleet: Fleet, values: list[bytes]) -> None:
    writer = fleet.broker.writer("raw")
    for value in values:
        writer.append(OutRecord(TOPICS.routes, value, b"run/a", (), 0)).result(WAIT)


def raw(rollout_id: str, number: int, routes: RouteArray) -> list[bytes]:
    """Records that a publisher with its checks off would send."""
    header = Header.of(rollout_key("run", rollout_id), attempt_id(number))
    return list(encode_attempt(routes, header, CARD, Outcome()))


def test_rows_of_zeros_are_set_aside(fleet: Fleet) -> None:
    zeros = np.zeros((4, 3, 2), np.uint8)
    put(fleet, [*raw("a:0:0:0", 1, zeros), *raw("a:1:0:0", 2, make_routes(4))])
    assert np.array_equal(fleet.reader.get("a:1:0:0", wait=WAIT).routes, make_routes(4))
    with pytest.raises(RouteCorrupt):
        fleet.reader.get("a:0:0:0", wait=WAIT)
    assert [letter.reason for letter in dead_letters(fleet.broker, TOPICS)] == ["expert_ids"]


def test_layers_shifted_by_the_dense_ones_are_refused(fleet: Fleet) -> None:
    """A model with three dense layers, whose routes somebody numbered from 0."""
    right, shifted = ModelCard(16, 2, tuple(range(3, 9))), ModelCard(16, 2, tuple(range(6)))
    with fleet.publisher(shifted) as publisher:
        ref = publisher.submit(make_routes(4, shifted), "a:0:0:0").ref
    fleet.reader.resolve([ref], wait=WAIT)
    with (
        RoutingReader(fleet.broker, TOPICS, run="run", card=right, stores=[fleet.url]) as strict,
        pytest.raises(RouteCorrupt, match="model card"),
    ):
        strict.resolve([ref])


def test_a_deleted_id_is_used_again_under_the_next_epoch_only(fleet: Fleet) -> None:
    with fleet.publisher() as old, fleet.publisher(epoch=1) as new:
        old.submit(make_routes(3), "a:0:0:0").result(WAIT)
        old.delete("a:0").result(WAIT)
        old.delete("a:0").result(WAIT)  # twice is as once
        late = old.submit(make_routes(3), "a:0:0:0").result(WAIT)  # a retry that comes after
        with pytest.raises(RouteDeleted, match="raise the epoch"):
            fleet.reader.get("a:0:0:0", min_offset=late.end.offset + 1, wait=WAIT)
        fresh = new.submit(make_routes(5), "a:0:0:0").ref
        assert fleet.reader.resolve([fresh], wait=WAIT).cu_seqlens.tolist() == [0, 5]
        where = old.delete("a:0").result(WAIT).positions  # of the old epoch still: the new one stays
        number = fleet.reader.page().rollouts[0].partition
        found = fleet.reader.get("a:0:0:0", min_offset=where[number].offset + 1, wait=WAIT)
        assert found.epoch == 1


def test_a_clear_is_of_one_run_and_its_old_epochs(fleet: Fleet) -> None:
    with fleet.publisher() as old, fleet.publisher(epoch=1) as new, fleet.publisher(run="other") as other:
        old.submit(make_routes(2), "a:0:0:0").result(WAIT)
        new.submit(make_routes(3), "b:0:0:0").result(WAIT)
        other.submit(make_routes(4), "a:0:0:0").result(WAIT)
        new.clear(through_epoch=0).result(WAIT)
        late = old.submit(make_routes(2), "c:0:0:0").result(WAIT)
        with pytest.raises(RouteDeleted, match="cleared"):
            fleet.reader.get("c:0:0:0", min_offset=late.end.offset + 1, wait=WAIT)
        assert not fleet.reader.exists("a:0:0:0")
        assert fleet.reader.get("b:0:0:0", wait=WAIT).ref.rows == 3
    with fleet.reads("other") as theirs:
        assert theirs.get("a:0:0:0", wait=WAIT).ref.rows == 4


def test_every_way_a_request_can_end_is_seen_and_only_complete_ones_are_streamed(fleet: Fleet) -> None:
    with fleet.publisher() as publisher:
        publisher.submit(make_routes(4), "a:0:0:0")
        publisher.submit(make_routes(3), "a:1:0:0", status="partial", finish_reason="pause")
        publisher.submit(make_routes(2), "a:2:0:0", status="aborted", finish_reason="abort")
        publisher.submit(None, "a:3:0:0", status="missing", finish_reason="prefix rows were not held")
        assert publisher.flush(WAIT)
    ended = {name: fleet.reader.get(f"a:{name}:0:0", wait=WAIT) for name in range(4)}
    assert [one.status for one in ended.values()] == ["complete", "partial", "aborted", "missing"]
    assert [one.ref.rows for one in ended.values()] == [4, 3, 2, 0]
    assert ended[3].finish_reason == "prefix rows were not held"
    streamed = [item.ref.rollout_id for item in fleet.reader.rollouts("trainer", idle_timeout=0.2)]
    assert streamed == ["a:0:0:0"]


def test_two_trainers_and_a_late_one_read_the_same_bytes(fleet: Fleet) -> None:
    with fleet.publisher() as publisher:
        for number in range(6):
            publisher.submit(make_routes(5, seed=number), f"d{number}:0:0:0")
        assert publisher.flush(WAIT)

    def all_of(group: str) -> dict[str, bytes]:
        with fleet.reader.rollouts(group, idle_timeout=0.2) as stream:
            found = {}
            for item in stream:
                assert len(item.rollout.routes) == item.ref.rows  # rows consumed = rows published
                found[item.ref.rollout_id] = item.rollout.routes.tobytes()
                item.ack()
            return found

    first, second = all_of("one"), all_of("two")
    assert len(first) == 6
    assert first == second
    assert all_of("one") == {}, "what was acknowledged does not come again"
    assert first == all_of("late")


def test_choices_of_one_request_stand_apart(fleet: Fleet) -> None:
    with fleet.publisher() as publisher:
        refs = [publisher.submit(make_routes(3, seed=choice), "a:0:0:0", choice).ref for choice in range(4)]
    batch = fleet.reader.resolve(refs, wait=WAIT)
    assert np.array_equal(batch.routes, np.concatenate([make_routes(3, seed=choice) for choice in range(4)]))


def test_damage_on_the_way_is_set_aside_and_the_next_is_served(fleet: Fleet) -> None:
    damaged, good = raw("a:0:0:0", 1, make_routes(9)), raw("a:1:0:0", 2, make_routes(9))
    flipped = bytearray(damaged[0])
    flipped[-1] ^= 1
    put(fleet, [bytes(flipped), damaged[0][:-5], damaged[1], *good])
    assert fleet.reader.get("a:1:0:0", wait=WAIT).ref.rows == 9
    with pytest.raises(RouteNotYet):
        fleet.reader.get("a:0:0:0")
    assert sorted(letter.reason for letter in dead_letters(fleet.broker, TOPICS)) == ["checksum", "truncated"]


def test_a_base_that_nobody_holds_never_comes(fleet: Fleet) -> None:
    tokens = make_tokens(9)
    with fleet.publisher() as publisher:
        base = publisher.submit(make_routes(4), "a:0:0:0", token_ids=tokens).ref
        publisher.delete("a:0").result(WAIT)
        turn = publisher.submit(make_routes(8), "a:1:0:0", token_ids=tokens, base=base).ref
        with pytest.raises(RouteNeverComing, match="base_not_held"):
            fleet.reader.resolve([turn], wait=WAIT)


def test_rows_of_another_type_than_the_header_says_are_refused() -> None:
    """uint8 read as int64 and the like: the header has the number of experts, type and size follow from it."""
    header = Header.of(rollout_key("run", "a"), attempt_id(1))
    chunk = decode(next(encode_attempt(make_routes(4), header, CARD, Outcome())))
    assert isinstance(chunk, Chunk)
    wide = replace(chunk, codec="raw", payload=make_routes(4).astype(np.int64).tobytes())
    with pytest.raises(BadRecord, match="raw bytes where the header says 24"):
        unpack(wide)
