"""The arithmetic of `routes plan`, and a record in words."""

from __future__ import annotations

import json

import pytest

from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Base, Clear, Delete, encode
from moebus.schemas.record.describe import describe
from moebus.schemas.sizing import Deployment, Rates, packed_fraction, plan_routes
from tests.support.routes import attempt_id, make_attempt

QWEN3 = ModelCard(128, 8, tuple(range(48)))
KIMI = ModelCard(384, 8, tuple(range(1, 61)))


def test_bytes_of_known_models() -> None:
    plan = plan_routes(QWEN3, rollouts=1536, tokens=32_769)
    assert plan.token == 384
    assert plan.rollout == 12 * (1 << 20)
    assert plan.step == 1536 * plan.rollout
    assert plan.rollout_records == 17  # 16 chunks of at most 800,000 bytes and an END
    assert 0.875 <= plan.rollout_wire / plan.rollout < 0.88
    kimi = plan_routes(KIMI, rollouts=1, tokens=131_073)
    assert kimi.rollout == 131_072 * 960
    assert packed_fraction(ModelCard(256, 8, (0,))) == 1.0


def test_seconds_partitions_and_disk() -> None:
    where = Deployment(publishers=4, stores=2, replication=3, step_seconds=100, log_seconds=1000, store_seconds=500)
    plan = plan_routes(QWEN3, 1000, 10_001, where, Rates(publish=100, ingest=50, read=100))
    assert plan.publish_seconds == pytest.approx(plan.step_wire / 400e6)
    assert plan.ingest_seconds == pytest.approx(plan.step_wire / 100e6)
    assert plan.read_seconds == pytest.approx(plan.step / 200e6)
    assert plan.step_seconds == plan.ingest_seconds
    assert plan.keeps_up
    assert plan.log_disk == pytest.approx(plan.step_wire * 10 * 3, rel=1e-6)
    assert plan.store_disk == pytest.approx(plan.step_wire * 5, rel=1e-6)
    assert plan.partitions == 8
    hurried = plan_routes(QWEN3, 1000, 10_001, Deployment(stores=2, step_seconds=10))
    assert not hurried.keeps_up
    assert hurried.partitions == 16


def test_one_token_is_no_row() -> None:
    plan = plan_routes(QWEN3, 1, 1)
    assert (plan.rollout, plan.rollout_records) == (0, 1)


@pytest.mark.parametrize(("rollouts", "tokens", "step", "field"), [(0, 1, 1.0, "rollouts"), (1, 0, 1.0, "tokens"),
                                                                  (1, 1, 0.0, "step_seconds")])  # fmt: skip
def test_numbers_that_make_no_sense(rollouts: int, tokens: int, step: float, field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        plan_routes(QWEN3, rollouts, tokens, Deployment(step_seconds=step))


def test_records_in_words() -> None:
    base = Base(attempt_id(9), 4, "a:0:0:0")
    attempt = make_attempt("a:0:1:0", rows=3, base=base, versions=((4, "v1"),))
    chunk, end = describe(attempt.chunks[0]), describe(attempt.end)
    assert (chunk["kind"], chunk["start"], chunk["rows"], chunk["versions"]) == ("chunk", 4, 3, [[4, "v1"]])
    assert chunk["base"] == {"rollout_id": "a:0:0:0", "choice": 0, "rows": 4, "attempt": chunk["base"]["attempt"]}  # type: ignore[index]
    assert (end["kind"], end["rows"], end["status"], end["group"]) == ("end", 7, "complete", "a")
    assert describe(encode(Delete("run", "a:1", attempt_id(1), 2)))["prefix"] == "a:1"
    assert describe(encode(Clear("run", 3, attempt_id(1))))["through_epoch"] == 3
    short = describe(b"MOER")
    assert (short["kind"], short["reason"], short["bytes"]) == ("unreadable", "truncated", 4)
    assert describe(None)["reason"] == "empty"
    json.dumps([chunk, end])
