from __future__ import annotations

import pytest

from moebus.consumers.store.keys import (
    attempt_key,
    choice_range,
    id_range,
    prefix_ranges,
    run_range,
    split_attempt_key,
)
from moebus.consumers.store.select import select
from moebus.consumers.store.state import AttemptState, State
from moebus.schemas.record import End, Header, Status
from moebus.schemas.rollout import RolloutKey, covers
from moebus.schemas.route_errors import RouteError
from tests.support.routes import attempt_id

KEY = RolloutKey("run", "a", 0)


def state(number: int, kind: State | Status, group: str = "g") -> AttemptState:
    """An attempt that is open, spoilt, lost or gone, or whole with a status."""
    header = Header("run", group, "a", 0, attempt_id(number))
    if kind in ("open", "spoilt", "lost", "gone"):
        return AttemptState(header, kind, 0, 0, reason="because")
    return AttemptState(header, "whole", 1, 0, end=End(header, 0, 0, 0, kind))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held", "named", "fence", "expected"),
    [
        ([state(1, "complete")], None, None, 1),
        ([state(1, "complete"), state(2, "partial"), state(3, "open"), state(4, "gone")], None, None, 1),
        ([state(1, "partial"), state(2, "aborted")], None, None, 2),
        ([state(1, "complete"), state(2, "complete")], 2, None, 2),
        ([state(1, "complete"), state(2, "complete")], None, None, "AmbiguousAttempt"),
        ([state(1, "complete"), state(2, "partial", "h")], None, None, "AmbiguousAttempt"),
        ([state(1, "complete"), state(2, "partial", "h")], 2, None, 2),
        ([], None, None, "RouteNotYet"),
        ([], None, "deleted", "RouteDeleted"),
        ([], 5, "deleted", "RouteNotYet"),
        ([state(1, "gone")], 5, "deleted", "RouteNotYet"),
        ([state(1, "gone")], 1, None, "RouteDeleted"),
        ([state(1, "gone"), state(2, "open")], None, "deleted", "RouteNotYet"),
        ([state(1, "gone"), state(2, "spoilt")], None, None, "RouteCorrupt"),
        ([state(1, "gone"), state(2, "lost")], None, None, "RouteNeverComing"),
        ([state(1, "complete"), state(2, "spoilt")], 2, None, "RouteCorrupt"),
    ],
)  # fmt: skip
def test_which_attempt_answers(
    held: list[AttemptState], named: int | None, fence: str | None, expected: int | str
) -> None:
    attempt = attempt_id(named) if named is not None else None
    try:
        found: int | str = int.from_bytes(select(KEY, held, attempt, fence).header.attempt, "big")
    except RouteError as error:
        found = error.name
    assert found == expected


def test_keys_keep_prefixes_apart() -> None:
    ids = ["a", "a:1", "a:1:0", "a:10", "a\0", "aé", "a:é", "x" * 255, "\x7f"]
    keys = [RolloutKey("run", rollout_id, choice) for rollout_id in ids for choice in (0, 0x3A3A, 65_535)]
    raw = {attempt_key(key, attempt_id(1)): key for key in keys}
    assert all(split_attempt_key(data) == (key, attempt_id(1)) for data, key in raw.items())
    assert max(map(len, raw)) < 511
    for prefix in ids:
        starts = prefix_ranges("run", prefix)
        found = {key.rollout_id for data, key in raw.items() if data.startswith(starts)}
        assert found == {rollout_id for rollout_id in ids if covers(prefix, rollout_id)}
        assert {k.rollout_id for d, k in raw.items() if d.startswith(id_range("run", prefix))} == {prefix}
    assert all(data.startswith(choice_range(key)) and data.startswith(run_range("run")) for data, key in raw.items())
    assert not any(data.startswith(run_range("ru")) for data in raw)
