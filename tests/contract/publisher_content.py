"""Contract of a publisher: what is stored, and what the receipts say."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from moebus.observability.metrics import Metrics
from moebus.producers.routing import NotSampled, PublisherSuspended, RoutingPublisher
from moebus.schemas.attempt import parse_attempt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import Chunk, Clear, Delete, End, assemble, decode, stored_checksum
from moebus.schemas.rollout import partition_key
from moebus.schemas.route_ref import token_hash
from tests.contract.publisher_world import PARTITIONS, WAIT, PublisherWorld, decoded, end_of
from tests.support.routes import make_routes, make_tokens


class ContentSuite:
    """A subclass provides the fixture `world`."""

    def test_a_rollout_is_stored_whole_and_its_receipt_says_where(self, world: PublisherWorld) -> None:
        routes, tokens = make_routes(10), make_tokens(11)
        metrics = Metrics()
        with world.make(metrics) as publisher:
            receipt = publisher.submit(routes, "a:0:0:0", 3, token_ids=tokens, prompt_rows=4, versions=[(0, "v1")])
            assert receipt.ref.rows == 10
            assert receipt.ref.token_hash == token_hash(tokens[:10])
            assert receipt.ref.prompt_hash == token_hash(tokens[:4])
            stored = receipt.result(WAIT)
        chunk_record, end_record = world.records()
        chunk, end = decode(chunk_record.value), decode(end_record.value)
        assert isinstance(chunk, Chunk)
        assert isinstance(end, End)
        assert chunk_record.value is not None
        assert np.array_equal(assemble(end, [chunk], [stored_checksum(chunk_record.value)]), routes)
        assert (end.status, end.prompt_rows, end.token_hash) == ("complete", 4, receipt.ref.token_hash)
        assert chunk.versions == ((0, "v1"),)
        assert end.header.attempt == parse_attempt(receipt.ref.attempt)
        assert (stored.end.partition, stored.end.offset) == (end_record.partition, end_record.offset)
        assert stored.records == 2
        assert end_record.key == partition_key("run", "a")
        assert end_record.header("correlation-id") == receipt.ref.attempt.encode()
        assert end_record.header("content-type") == b"application/octet-stream"
        assert metrics.value("moebus_routes_rollouts_total", outcome="stored") == 1
        assert metrics.value("moebus_routes_records_total", kind="end") == 1
        assert metrics.value("moebus_routes_buffer_bytes") == 0

    def test_a_large_rollout_becomes_many_chunks(self, world: PublisherWorld) -> None:
        with world.make() as publisher:
            stored = publisher.submit(make_routes(400_000), "big").result(WAIT)
        assert stored.records == 5
        kinds = [type(record).__name__ for record in decoded(world)]
        assert kinds == ["Chunk"] * 4 + ["End"]

    @pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "uint16"])
    def test_any_integer_type_is_taken_and_copied_once(self, world: PublisherWorld, dtype: str) -> None:
        routes = make_routes(5).astype(dtype)
        expected = routes.copy()
        with world.make() as publisher, world.outage():
            receipt = publisher.submit(routes, "a")
            routes[:] = 0  # the caller reuses its buffer before anything was sent
        receipt.result(WAIT)
        first = world.records()[0].value
        end, chunk = decode(world.records()[1].value), decode(first)
        assert isinstance(end, End)
        assert isinstance(chunk, Chunk)
        assert first is not None
        assert np.array_equal(assemble(end, [chunk], [stored_checksum(first)]), expected)

    def test_rows_may_be_none_or_missing(self, world: PublisherWorld) -> None:
        with world.make() as publisher:
            missing = publisher.submit(None, "gone", status="missing")
            empty = publisher.submit(make_routes(0), "empty", status="aborted", finish_reason="abort")
            assert (missing.ref.rows, empty.ref.rows) == (0, 0)
            assert missing.result(WAIT).records == 1
            assert empty.result(WAIT).records == 1
        statuses = {end.header.rollout_id: end.status for end in map(end_of, world.records())}
        assert statuses == {"gone": "missing", "empty": "aborted"}

    def test_delete_and_clear_go_to_every_partition_under_one_id(self, world: PublisherWorld) -> None:
        with world.make() as publisher:
            deleted = publisher.delete("a:1", epoch=3)
            cleared = publisher.clear(through_epoch=4)
            positions = deleted.result(WAIT).positions
            assert set(positions) == set(cleared.result(WAIT).positions) == set(range(PARTITIONS))
            with pytest.raises(InvalidInput, match="prefix"):
                publisher.delete("a:")
        found = decoded(world)
        deletes = [record for record in found if isinstance(record, Delete)]
        clears = [record for record in found if isinstance(record, Clear)]
        assert len(deletes) == len(clears) == PARTITIONS
        assert len(set(deletes)) == 1
        assert (deletes[0].prefix, deletes[0].epoch, deletes[0].run) == ("a:1", 3, "run")
        assert {record.through_epoch for record in clears} == {4}
        assert deletes[0].id == parse_attempt(deleted.fence_id)

    def test_suspend_sends_nothing_and_says_so(self, world: PublisherWorld) -> None:
        with world.make() as publisher:
            publisher.suspend()
            assert isinstance(publisher.submit(make_routes(1), "a").exception(WAIT), PublisherSuspended)
            publisher.delete("x").result(WAIT)
            publisher.resume()
            publisher.submit(make_routes(1), "b").result(WAIT)
            assert publisher.stats().suspended == 1
            assert publisher.flush(WAIT)

    def test_a_receipt_can_be_awaited_and_calls_back(self, world: PublisherWorld) -> None:
        called: list[str] = []

        async def main(publisher: RoutingPublisher) -> int:
            receipt = publisher.submit(make_routes(2), "a")
            receipt.add_done_callback(lambda done: called.append(done.name))
            stored = await asyncio.wait_for(receipt, WAIT)
            return stored.records

        with world.make() as publisher:
            assert asyncio.run(main(publisher)) == 2
        assert len(called) == 1

    def test_cancelling_a_waiter_leaves_the_receipt_alone(self, world: PublisherWorld) -> None:
        async def main(publisher: RoutingPublisher) -> None:
            with world.outage():
                receipt = publisher.submit(make_routes(2), "a")
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(receipt, 0.01)
            assert (await receipt).records == 2

        with world.make() as publisher:
            asyncio.run(main(publisher))

    def test_a_turn_sends_only_new_rows(self, world: PublisherWorld) -> None:
        tokens = make_tokens(21)
        first = make_routes(10)
        second = np.concatenate([make_routes(10, seed=5), make_routes(10, seed=6)])
        with world.make() as publisher:
            base = publisher.submit(first, "a:0:0:0", token_ids=tokens).ref
            turn = publisher.submit(second, "a:0:1:0", token_ids=tokens, base=base)
            only_new = publisher.submit(second[10:], "a:0:1:0", choice=1, start=10, token_ids=tokens, base=base)
            assert turn.ref.rows == only_new.ref.rows == 20
            assert publisher.flush(WAIT)
            assert publisher.stats().base_refused == 0
        found = decoded(world)
        chunks = [r for r in found if isinstance(r, Chunk) and r.header.rollout_id == "a:0:1:0"]
        assert [(chunk.start, chunk.rows) for chunk in chunks] == [(10, 10), (10, 10)]
        assert chunks[0].payload == chunks[1].payload
        assert chunks[0].header.base is not None
        assert chunks[0].header.base.attempt == parse_attempt(base.attempt)

    def test_a_base_whose_tokens_differ_is_refused_or_only_its_prompt_used(self, world: PublisherWorld) -> None:
        tokens = make_tokens(21)
        other = tokens.copy()
        other[7] += 1
        elsewhere = make_tokens(21, seed=9)
        metrics = Metrics()
        with world.make(metrics) as publisher:
            base = publisher.submit(make_routes(10), "a:0:0:0", token_ids=tokens, prompt_rows=5).ref
            publisher.submit(make_routes(20), "a:1:0:0", token_ids=other, base=base)
            publisher.submit(make_routes(20), "a:2:0:0", token_ids=elsewhere, base=base)
            with pytest.raises(InvalidInput, match="start"):
                publisher.submit(make_routes(10), "a:3:0:0", start=10, token_ids=elsewhere, base=base)
            with pytest.raises(InvalidInput, match="token_ids"):
                publisher.submit(make_routes(20), "a:3:0:0", base=base)
            with pytest.raises(InvalidInput, match="another run or group"):
                publisher.submit(make_routes(20), "b:3:0:0", token_ids=tokens, base=base)
            assert publisher.flush(WAIT)
            assert publisher.stats().base_refused == 1
        assert metrics.value("moebus_routes_bases_refused_total") == 1
        starts = {r.header.rollout_id: r.start for r in decoded(world) if isinstance(r, Chunk)}
        assert starts == {"a:0:0:0": 0, "a:1:0:0": 5, "a:2:0:0": 0}

    def test_a_new_segment_starts_afresh_beside_the_one_before(self, world: PublisherWorld) -> None:
        """Its history was rendered again: other tokens, all of them sent, both segments in one group and in order."""
        tokens, again = make_tokens(21), make_tokens(9, seed=4)
        with world.make() as publisher:
            first = publisher.submit(make_routes(10), "a:0:0:0", token_ids=tokens).ref
            turn = publisher.submit(make_routes(20), "a:0:1:0", token_ids=tokens, base=first).ref
            publisher.submit(make_routes(8), "a:0:1:1", token_ids=again)
            publisher.submit(make_routes(8, seed=3), "a:0:2:1", token_ids=again, base=turn)
            assert publisher.flush(WAIT)
            assert publisher.stats().base_refused == 1, "the one that named a base of the old segment"
        found = [record for record in decoded(world) if isinstance(record, Chunk)]
        assert [(one.header.rollout_id, one.start, one.rows) for one in found] == [
            ("a:0:0:0", 0, 10), ("a:0:1:0", 10, 10), ("a:0:1:1", 0, 8), ("a:0:2:1", 0, 8),
        ]  # fmt: skip
        assert [one.header.base is None for one in found] == [True, False, True, True]
        assert {record.partition for record in world.records()} == {world.records()[0].partition}

    def test_without_a_card_it_only_deletes(self, world: PublisherWorld) -> None:
        with world.make(card=None) as publisher:
            publisher.delete("a").result(WAIT)
            with pytest.raises(InvalidInput, match="card"):
                publisher.submit(make_routes(1), "a")

    def test_a_share_of_the_groups_is_sent_whole(self, world: PublisherWorld) -> None:
        with world.make(sample=0.5) as publisher:
            receipts = [publisher.submit(make_routes(1), f"{n % 40}:{n}:0:0") for n in range(80)]
            skipped = {r.ref.effective_group for r in receipts if isinstance(r.exception(WAIT), NotSampled)}
            assert publisher.flush(WAIT), "skipped on purpose is no failure"
            assert publisher.stats().skipped + publisher.stats().stored == 80
        sent = {record.header.group for record in decoded(world) if isinstance(record, End)}
        assert sent | skipped == {str(n) for n in range(40)}
        assert not sent & skipped
        assert 8 <= len(sent) <= 32
        with world.make(sample=0.0) as publisher:
            assert isinstance(publisher.submit(make_routes(1), "a").exception(WAIT), NotSampled)
