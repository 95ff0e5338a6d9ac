"""Contract of a publisher: a log that loses acks or refuses records."""

from __future__ import annotations

from moebus.broker.errors import AppendFailed, AppendUnknown
from moebus.broker.ports import OutRecord
from moebus.observability.metrics import Metrics
from moebus.schemas.record import Chunk, End, decode
from tests.contract.publisher_world import WAIT, MemoryWorld, decoded
from tests.support.routes import make_routes
from tests.support.wait import wait_until


class FaultSuite:
    """A subclass provides the fixture `world`, on the log in memory."""

    def test_unfinished_appends_stay_in_the_window(self, world: MemoryWorld) -> None:
        publisher = world.make()
        with world.outage():
            for i in range(200):
                publisher.submit(make_routes(1), f"r{i}")
            writer = wait_until(lambda: world.broker.cluster.writers, WAIT, "the child to start")[-1]
            wait_until(lambda: writer.unsettled() == 32, what="window full")  # type: ignore[attr-defined]
        assert publisher.close(WAIT) == []

    def test_lost_acks_are_unknown_not_stored(self, world: MemoryWorld) -> None:
        publisher = world.make(receipt_timeout=0.05)
        with world.broker.lost_acks():
            receipt = publisher.submit(make_routes(1), "a")
            assert isinstance(receipt.exception(WAIT), AppendUnknown)
        assert not publisher.flush(WAIT)
        again = publisher.submit(make_routes(1), "a", attempt=receipt.ref.attempt)
        again.result(WAIT)
        publisher.close(WAIT)
        values = [record.value for record in world.records()]
        assert values[:2] == values[2:], "a re-send is the same bytes"

    def test_a_refused_chunk_fails_its_rollout_alone_and_sends_no_end(self, world: MemoryWorld) -> None:
        def bad(record: OutRecord) -> bool:
            found = decode(record.value)
            return isinstance(found, Chunk) and found.header.rollout_id == "bad"

        metrics = Metrics()
        with world.make(metrics) as publisher, world.broker.refusing(bad):
            good, wrong, also = (publisher.submit(make_routes(400_000), name) for name in ("g1", "bad", "g2"))
            assert isinstance(wrong.exception(WAIT), AppendFailed)
            good.result(WAIT)
            also.result(WAIT)
            assert (publisher.stats().failed, publisher.stats().stored) == (1, 2)
        assert metrics.value("moebus_routes_rollouts_total", outcome="failed") == 1
        assert metrics.value("moebus_routes_publish_duration_seconds_count") == 2, "of those that were stored"
        ended = {r.header.rollout_id for r in decoded(world) if isinstance(r, End)}
        assert ended == {"g1", "g2"}
