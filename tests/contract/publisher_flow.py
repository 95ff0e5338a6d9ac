"""Contract of a publisher: bounds, outages, the truth of flush and close."""

from __future__ import annotations

import threading
from collections.abc import Sized
from functools import partial

import pytest

from moebus.broker.errors import AppendUnknown
from moebus.observability.metrics import Metrics
from moebus.producers.routing import PublisherClosed, RoutesDropped
from moebus.schemas.record import End
from tests.contract.publisher_world import PARTITIONS, WAIT, PublisherWorld, decoded
from tests.support.routes import make_routes
from tests.support.wait import wait_until


class FlowSuite:
    """A subclass provides the fixture `world`; its log can go away."""

    def test_full_drop_reports_and_counts(self, world: PublisherWorld) -> None:
        metrics = Metrics()
        publisher = world.make(metrics, max_bytes=1 << 20, full="drop")
        with world.outage():
            kept = publisher.submit(make_routes(100_000), "kept")
            dropped = publisher.submit(make_routes(100_000), "dropped")
            assert isinstance(dropped.exception(WAIT), RoutesDropped)
            assert publisher.stats().buffer_bytes <= 1 << 20
            assert publisher.submit(make_routes(3), "small").done() is False  # what still fits is taken
        kept.result(WAIT)
        assert not publisher.flush(WAIT), "flush may not call it done when a rollout was dropped"
        assert publisher.flush(WAIT)
        assert publisher.stats().dropped == 1
        assert publisher.close(WAIT) == []
        assert metrics.value("moebus_routes_rollouts_total", outcome="dropped") == 1
        assert {r.header.rollout_id for r in decoded(world) if isinstance(r, End)} == {"kept", "small"}

    def test_full_block_waits_for_room(self, world: PublisherWorld) -> None:
        publisher = world.make(max_bytes=1 << 20, block_seconds=WAIT)
        with world.outage():
            publisher.submit(make_routes(100_000), "first")
            waiting: list[BaseException | None] = []
            thread = threading.Thread(
                target=lambda: waiting.append(publisher.submit(make_routes(100_000), "second").exception(WAIT))
            )
            thread.start()
            wait_until(lambda: publisher.stats().submitted == 2, what="second submit begun")
            assert publisher.stats().waiting == 1
        thread.join(WAIT)
        assert waiting == [None]
        assert publisher.close(WAIT) == []

    def test_full_block_gives_up_at_its_deadline(self, world: PublisherWorld) -> None:
        publisher = world.make(max_bytes=1 << 20, block_seconds=0.01)
        with world.outage():
            publisher.submit(make_routes(100_000), "first")
            assert isinstance(publisher.submit(make_routes(100_000), "second").exception(WAIT), RoutesDropped)
        assert publisher.close(WAIT) == []

    def test_an_outage_never_reaches_submit_and_everything_arrives_after(self, world: PublisherWorld) -> None:
        publisher = world.make()
        with world.outage():
            receipts = [publisher.submit(make_routes(3, seed=i), f"r{i}") for i in range(100)]
            fence = publisher.delete("zzz")
            assert not publisher.flush(0.0)
            with pytest.raises(TimeoutError, match="run/r0#0"):
                receipts[0].result(0.0)
            assert publisher.stats().waiting == 101
        assert publisher.flush(WAIT)
        assert all(receipt.done() and receipt.exception() is None for receipt in receipts)
        assert set(fence.result(WAIT).positions) == set(range(PARTITIONS))
        assert len(world.records()) == 200 + PARTITIONS
        assert publisher.close(WAIT) == []

    def test_close_names_what_it_gave_up_and_fails_those_receipts(self, world: PublisherWorld) -> None:
        publisher = world.make()
        done = publisher.submit(make_routes(1), "done")
        done.result(WAIT)
        with world.outage():
            left = [publisher.submit(make_routes(1), f"r{i}") for i in range(50)]
            names = publisher.close(0.05)
            assert names == [receipt.name for receipt in left]
            assert publisher.close(WAIT) == []
            errors = [receipt.exception(WAIT) for receipt in left]
        assert all(isinstance(error, (AppendUnknown, PublisherClosed)) for error in errors)
        assert done.exception() is None
        with pytest.raises(PublisherClosed, match="run/late"):
            publisher.submit(make_routes(1), "late")

    def test_a_group_keeps_its_order_and_every_receipt_settles_once(self, world: PublisherWorld) -> None:
        told: list[str] = []
        with world.make() as publisher:
            with world.outage():
                for number in range(60):
                    receipt = publisher.submit(make_routes(number % 7), f"a:{number}:0:0")
                    receipt.add_done_callback(lambda done: told.append(done.name.split(" ")[0]))
                assert told == []
            assert publisher.flush(WAIT)
        assert told == [f"run/a:{number}:0:0#0" for number in range(60)]
        ends = [record.header.rollout_id for record in decoded(world) if isinstance(record, End)]
        assert ends == [f"a:{number}:0:0" for number in range(60)]

    def test_a_filling_buffer_is_told_on_another_thread_and_again_only_after_it_fell(
        self, world: PublisherWorld
    ) -> None:
        told: list[tuple[int, int, bool]] = []
        here = threading.get_ident()

        def tell(used: int, limit: int) -> None:
            told.append((used, limit, threading.get_ident() == here))
            raise ValueError("a callback that fails harms nobody")

        with world.make(max_bytes=1 << 20, full="drop", high_water=0.5, on_high_water=tell) as publisher:
            for round_ in (1, 2):
                with world.outage():
                    for number in range(40):
                        publisher.submit(make_routes(4_000), f"r{round_}-{number}")
                    wait_until(partial(_has, told, round_), WAIT, "the callback")
                publisher.flush(WAIT)
        assert len(told) == 2
        assert all(used >= limit // 2 and not same for used, limit, same in told)


def _has(told: Sized, count: int) -> bool:
    return len(told) == count
