"""Contract of a publisher: bad input, at once and by name."""

from __future__ import annotations

import numpy as np
import pytest

from moebus.producers.routing import PublisherClosed, RoutingPublisher
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import End
from tests.contract.publisher_world import WAIT, PublisherWorld, decoded
from tests.support.fork import exit_code, in_a_fork
from tests.support.routes import make_routes

BAD = [
    ({"routes": make_routes(3)[:, :2]}, "routes"),
    ({"routes": make_routes(3)[0]}, "routes"),
    ({"routes": make_routes(3).astype("float32")}, "routes"),
    ({"routes": np.full((3, 3, 2), 16)}, "routes"),
    ({"routes": np.full((3, 3, 2), -1)}, "routes"),
    ({"routes": None}, "routes"),
    ({"status": "missing"}, "routes"),
    ({"status": "done"}, "status"),
    ({"rollout_id": ""}, "rollout_id"),
    ({"choice": 65_536}, "choice"),
    ({"group": "x" * 256}, "group"),
    ({"token_ids": [1, 2]}, "token_ids"),
    ({"token_ids": [0.5] * 3}, "token_ids"),
    ({"prompt_rows": 4}, "prompt_rows"),
    ({"start": 1}, "start"),
    ({"versions": [(1, "v")]}, "versions"),
    ({"versions": [(0, "v"), (0, "w")]}, "versions"),
    ({"attempt": "short"}, "attempt"),
]


class InputSuite:
    """A subclass provides the fixture `world`."""

    @pytest.mark.parametrize(("change", "field"), BAD)
    def test_bad_input_raises_at_once_and_names_the_field(
        self, world: PublisherWorld, change: dict[str, object], field: str
    ) -> None:
        arguments: dict[str, object] = {"routes": make_routes(3), "rollout_id": "a", **change}
        with world.make() as publisher:
            with pytest.raises(InvalidInput) as caught:
                publisher.submit(**arguments)  # type: ignore[arg-type]
            assert isinstance(caught.value, ValueError)
            assert caught.value.field == field
            assert publisher.stats().submitted == 0
            assert publisher.flush(WAIT)
        assert world.records() == []

    def test_an_expert_twice_is_told_by_the_receipt_and_nothing_is_sent(self, world: PublisherWorld) -> None:
        with world.make() as publisher:
            bad = publisher.submit(np.full((3, 3, 2), 7), "a")
            publisher.submit(make_routes(3), "b").result(WAIT)
            error = bad.exception(WAIT)
            assert isinstance(error, InvalidInput)
            assert error.field == "routes"
        assert {r.header.rollout_id for r in decoded(world) if isinstance(r, End)} == {"b"}

    def test_an_expert_twice_further_on_is_told_too_and_the_rollout_gets_no_end(self, world: PublisherWorld) -> None:
        rows = make_routes(200_000)  # two chunks
        rows[-1] = 7
        with world.make(max_bytes=4 << 20) as publisher:
            error = publisher.submit(rows, "a").exception(WAIT)
            assert isinstance(error, InvalidInput)
            assert error.field == "routes"
            assert publisher.submit(make_routes(3), "a").exception(WAIT) is None, "as another attempt"
        ends = [r for r in decoded(world) if isinstance(r, End)]
        assert [end.rows for end in ends] == [3]

    def test_one_rollout_above_the_bound_is_refused_at_once(self, world: PublisherWorld) -> None:
        with (
            world.make(max_bytes=1 << 20) as publisher,
            pytest.raises(InvalidInput, match=r"1201024 bytes .*publisher.max_bytes"),
        ):
            publisher.submit(make_routes(200_000), "a")

    def test_a_forked_process_is_told_to_make_its_own_and_closes_nothing(self, world: PublisherWorld) -> None:
        with world.make() as publisher:
            assert exit_code(in_a_fork(lambda: _use_in_a_fork(publisher))) == 0
            publisher.submit(make_routes(1), "a").result(WAIT)
        assert len(world.records()) == 2


def _use_in_a_fork(publisher: RoutingPublisher) -> int:
    """0 where every call of a forked process is refused by name and `close` touches nothing."""
    calls = (
        lambda: publisher.submit(make_routes(1), "a"),
        lambda: publisher.delete("a"),
        lambda: publisher.clear(0),
        lambda: publisher.flush(1),
    )
    for call in calls:
        try:
            call()
        except PublisherClosed as exc:
            if "forked" not in str(exc):
                return 1
        else:
            return 2
    return 0 if publisher.close(1) == [] else 3
