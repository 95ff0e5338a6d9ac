"""Publisher -> log in memory -> real stores over HTTP -> RoutingReader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import OutRecord
from moebus.broker.topics import Topics, ensure
from moebus.consumers import RoutingReader
from moebus.consumers.reader import StoreUnreachable, StreamOptions
from moebus.observability.metrics import Metrics
from moebus.producers import RoutingPublisher
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.route_errors import AmbiguousAttempt, RouteCorrupt, RouteDeleted, RouteNotYet, StoreCatchingUp
from moebus.schemas.route_ref import RouteRef
from tests.support.routes import CARD, make_attempt, make_routes, make_tokens
from tests.support.store_http import serving
from tests.support.wait import wait_until

TOPICS = Topics("t")
PARTITIONS = 4
WAIT = 20.0


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    memory = MemoryBroker()
    ensure(memory.admin(), TOPICS, routes_partitions=PARTITIONS)
    yield memory
    memory.close()


@pytest.fixture
def store(broker: MemoryBroker, tmp_path: Path) -> Iterator[str]:
    with serving(broker, TOPICS, tmp_path / "store") as http:
        yield http.url


@pytest.fixture
def publisher(broker: MemoryBroker) -> Iterator[RoutingPublisher]:
    with RoutingPublisher(broker, TOPICS, run="run", card=CARD) as opened:
        yield opened


@pytest.fixture
def reader(broker: MemoryBroker, store: str) -> Iterator[RoutingReader]:
    with RoutingReader(broker, TOPICS, run="run", card=CARD, stores=[store]) as opened:
        # a store answers once it has begun to follow the log
        wait_until(lambda: _ready(opened), what="the store to be ready")
        yield opened


def _ready(reader: RoutingReader) -> bool:
    try:
        reader.page(limit=1)
    except (StoreUnreachable, StoreCatchingUp):
        return False
    return True


def test_resolve_gives_what_was_submitted_aligned_with_the_tokens(
    publisher: RoutingPublisher, reader: RoutingReader
) -> None:
    sizes = (5, 1, 0, 700)
    routes = [make_routes(rows, seed=rows) for rows in sizes]
    tokens = [make_tokens(rows + 1, seed=rows) for rows in sizes]
    refs = [
        publisher.submit(one, f"d{i}:0:0:0", i, token_ids=ids, versions=[(0, "v1")]).ref
        for i, (one, ids) in enumerate(zip(routes, tokens, strict=True))
    ]
    batch = reader.resolve([RouteRef.parse(str(ref)) for ref in refs], tokens, wait=WAIT)
    assert batch.cu_seqlens.tolist() == [0, 6, 8, 9, 710]
    for i, one in enumerate(routes):
        first = int(batch.cu_seqlens[i])
        assert np.array_equal(batch.routes[first : first + len(one)], one)
        assert batch.valid[first : first + len(one)].all()
        assert not batch.valid[first + len(one)]
    only = reader.resolve(refs, layers=[5], wait=WAIT)
    assert np.array_equal(only.per_router([5])[0][:5], routes[0][:, 2])
    assert reader.resolve([refs[0], refs[0]], wait=WAIT).cu_seqlens.tolist() == [0, 5, 10]


def test_turns_and_samples_of_one_prompt_come_back_whole(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    tokens = make_tokens(41)
    turns = [make_routes(10, seed=1)]
    refs = [publisher.submit(turns[0], "a:0:0:0", token_ids=tokens, prompt_rows=6).ref]
    for turn in (1, 2, 3):
        rows = np.concatenate([turns[-1], make_routes(10, seed=turn + 10)])
        turns.append(rows)
        refs.append(
            publisher.submit(rows, f"a:0:{turn}:0", token_ids=tokens, base=refs[-1], start=0, prompt_rows=6).ref
        )
    other = np.concatenate([tokens[:6], make_tokens(10, seed=99)])
    sample = np.concatenate([turns[0][:6], make_routes(9, seed=77)])
    sampled = publisher.submit(sample, "a:1:0:0", token_ids=other, base=refs[0]).ref
    batch = reader.resolve([*refs, sampled], wait=WAIT)
    assert np.array_equal(batch.routes, np.concatenate([*turns, sample]))
    publisher.delete("a:0:0:0").result(WAIT)
    wait_until(lambda: not reader.exists("a:0:0:0"), what="the delete")
    again = reader.resolve([refs[3], sampled])
    assert np.array_equal(again.routes, np.concatenate([turns[3], sample])), "a base's rows stay while referred to"


def test_the_stream_takes_base_rows_from_the_store(
    broker: MemoryBroker, publisher: RoutingPublisher, reader: RoutingReader
) -> None:
    tokens = make_tokens(21)
    rows = make_routes(20, seed=3)
    base = publisher.submit(rows[:10], "a:0:0:0", token_ids=tokens).ref
    publisher.submit(rows, "a:0:1:0", token_ids=tokens, base=base)
    assert publisher.flush(WAIT)
    stream = reader.rollouts("trainer", idle_timeout=1.0, options=StreamOptions(base_wait=WAIT))
    found = {item.ref.rollout_id: item.rollout.routes for item in stream}
    assert np.array_equal(found["a:0:1:0"], rows)
    assert np.array_equal(found["a:0:0:0"], rows[:10])


def test_missing_ones_raise_or_are_masked(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    here = publisher.submit(make_routes(4), "a:1:0:0")
    gone = publisher.submit(make_routes(4, seed=2), "a:2:0:0")
    never = RouteRef("run", "b", 0, here.ref.attempt, 2)
    here.result(WAIT)
    reader.resolve([here.ref, gone.ref], wait=WAIT)
    publisher.delete("a:2").result(WAIT)
    wait_until(lambda: not reader.exists("a:2:0:0"), what="the delete")
    with pytest.raises(RouteDeleted, match="a:2:0:0"):
        reader.resolve([here.ref, gone.ref])
    with pytest.raises(RouteNotYet, match="run/b#0"):
        reader.resolve([never], wait=0.05)
    batch = reader.resolve([here.ref, gone.ref, never], missing="mask")
    assert batch.valid.tolist() == [True] * 4 + [False] * 6
    assert {index: type(error) for index, error in batch.absent.items()} == {1: RouteDeleted, 2: RouteNotYet}
    assert batch.absent_fraction == 0.6


def test_delete_a_1_keeps_a_10(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    ids = ["a:1", "a:1:0:0", "a:10", "a:10:0:0", "a", "ab:1:0:0"]
    for name in ids:
        publisher.submit(make_routes(2), name)
    assert publisher.flush(WAIT)
    wait_until(lambda: len(reader.page("a").rollouts) == 5, what="all stored")
    publisher.delete("a:1").result(WAIT)
    wait_until(lambda: not reader.exists("a:1"), what="the delete")
    assert [reader.exists(name) for name in ids] == [False, False, True, True, True, True]
    publisher.submit(make_routes(2), "a:1:0:0").result(WAIT)
    publisher.submit(make_routes(2), "a:1:0:1", group="other").result(WAIT)
    publisher.submit(make_routes(2), "z").result(WAIT)
    assert reader.get("z", wait=WAIT).ref.rows == 2
    assert not reader.exists("a:1:0:0"), "a late one resurrects nothing"


def test_get_by_identity(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    stored = publisher.submit(
        make_routes(9), "a:0:0:0", 2, status="aborted", finish_reason="abort", versions=[(0, "v1"), (4, "v2")]
    ).result(WAIT)
    found = reader.get("a:0:0:0", 2, min_offset=stored.end.offset + 1, wait=WAIT)
    assert (found.status, found.finish_reason, found.versions) == ("aborted", "abort", ((0, "v1"), (4, "v2")))
    assert np.array_equal(found.routes, make_routes(9))
    part = reader.get("a:0:0:0", 2, layers=[5, 1], start=3, stop=7)
    assert np.array_equal(part.routes, make_routes(9)[3:7][:, [2, 0]])
    assert (part.start, part.versions) == (3, ((3, "v1"), (4, "v2")))
    with pytest.raises(InvalidInput, match="layers: 4"):
        reader.get("a:0:0:0", 2, layers=[4])
    with pytest.raises(InvalidInput, match="choice"):
        reader.get("a:0:0:0", -1)


def test_two_attempts_are_ambiguous_and_two_groups_too(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    one = publisher.submit(make_routes(2), "x")
    two = publisher.submit(make_routes(3), "x")
    publisher.submit(make_routes(2), "y", group="g1")
    publisher.submit(make_routes(2), "y", group="g2")
    assert publisher.flush(WAIT)
    wait_until(lambda: len(reader.page().rollouts) == 4, what="all stored")
    for name in ("x", "y"):
        with pytest.raises(AmbiguousAttempt):
            reader.get(name)
        assert reader.exists(name)
    assert reader.get("x", attempt=two.ref.attempt).ref.rows == 3
    assert reader.resolve([one.ref, two.ref]).cu_seqlens.tolist() == [0, 2, 5]
    assert reader.get("y", group="g2").ref.effective_group == "g2"


def test_a_ref_that_does_not_fit_what_is_stored_is_corrupt(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    ref = publisher.submit(make_routes(4), "a", token_ids=make_tokens(4)).ref
    reader.resolve([ref], wait=WAIT)
    longer = RouteRef("run", "a", 0, ref.attempt, 5)
    with pytest.raises(RouteCorrupt, match="the ref says 5"):
        reader.resolve([longer])
    with pytest.raises(InvalidInput, match="another run"):
        reader.resolve([RouteRef("other", "a", 0, ref.attempt, 4)])
    with pytest.raises(InvalidInput, match="tokens"):
        reader.resolve([ref], [make_tokens(4, seed=5)])


def test_rollouts_of_another_model_are_refused(broker: MemoryBroker, publisher: RoutingPublisher, store: str) -> None:
    ref = publisher.submit(make_routes(4), "a").ref
    wrong = ModelCard(num_experts=16, top_k=2, moe_layers=(1, 2, 4))
    with (
        RoutingReader(broker, TOPICS, run="run", card=wrong, stores=[store]) as other,
        pytest.raises(RouteCorrupt, match="model card"),
    ):
        other.resolve([ref], wait=WAIT)


def test_listing_pages_over_shares(broker: MemoryBroker, publisher: RoutingPublisher, tmp_path: Path) -> None:
    for i in range(25):
        publisher.submit(make_routes(1), f"r{i:02d}", group=f"grp é {i}" if i % 2 else None)
    assert publisher.flush(WAIT)
    with ExitStack() as stack:
        for number, share in enumerate([(0, 1), (2,), (3,), (0, 1)]):
            stack.enter_context(serving(broker, TOPICS, tmp_path / f"s{number}", share, store_id=f"s{number}"))
        reader = stack.enter_context(RoutingReader(broker, TOPICS, run="run"))
        wait_until(lambda: _ready(reader) and len(reader.page().rollouts) == 25, what="all shares ready")
        found: list[str] = []
        after: str | None = None
        while True:
            page = reader.page(limit=4, after=after)
            found += [one.ref.rollout_id for one in page.rollouts]
            after = page.after
            if after is None:
                break
        assert sorted(found) == [f"r{i:02d}" for i in range(25)]
        with pytest.raises(InvalidInput, match="after"):
            reader.page(after="9.x")


def test_one_store_dies_and_the_reader_goes_to_its_copy(
    broker: MemoryBroker, publisher: RoutingPublisher, tmp_path: Path
) -> None:
    metrics = Metrics()
    refs = [publisher.submit(make_routes(3, seed=i), f"r{i}").ref for i in range(12)]
    with ExitStack() as stack:
        dying = ExitStack()
        dying.enter_context(serving(broker, TOPICS, tmp_path / "a", (0, 1, 2, 3), store_id="a"))
        stack.enter_context(serving(broker, TOPICS, tmp_path / "b", (0, 1, 2, 3), store_id="b"))
        reader = stack.enter_context(RoutingReader(broker, TOPICS, run="run", metrics=metrics))
        expected = np.concatenate([make_routes(3, seed=i) for i in range(12)])
        assert np.array_equal(reader.resolve(refs, wait=WAIT).routes, expected)
        dying.close()
        assert np.array_equal(reader.resolve(refs, wait=WAIT).routes, expected)
    assert metrics.value("moebus_reader_resolved_total", outcome="found") == 24
    assert metrics.value("moebus_reader_resolve_duration_seconds_count") == 2


def test_no_store_at_all_is_said(broker: MemoryBroker) -> None:
    with RoutingReader(broker, TOPICS, run="run") as alone:
        with pytest.raises(StoreUnreachable, match="moebus store"):
            alone.get("a")
        with pytest.raises(StoreUnreachable, match="moebus store"):
            alone.page()


def test_a_spoilt_attempt_is_corrupt(broker: MemoryBroker, reader: RoutingReader) -> None:
    one, other = make_attempt("a", chunks=2, seed=1), make_attempt("a", chunks=2, seed=2)
    writer = broker.writer("test")
    for value in (one.records[0], other.records[0], *one.records[1:]):
        writer.append(OutRecord(TOPICS.routes, value, b"run/a", (), 0)).result(5)
    with pytest.raises(RouteCorrupt, match="spoilt"):
        wait_until(lambda: reader.get("a", wait=WAIT), what="the verdict")
