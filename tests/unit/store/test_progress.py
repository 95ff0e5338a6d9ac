"""Whether reads can be answered: until the log was read, and while Kafka is heard."""

from __future__ import annotations

from moebus.consumers.store.progress import SILENCE_SECONDS, Progress
from moebus.observability.clock import ManualClock


def test_until_the_log_was_read_to_where_it_ended_at_the_start() -> None:
    progress = Progress(ManualClock())
    assert progress.unready() == "the store is starting"
    progress.wait_for(None)
    progress.follow(0, goal=5, applied=2)
    progress.follow(3, goal=7, applied=7)
    assert progress.unready() == "still reading the log: partition 0 at 2 of 5"
    assert progress.unready(3) is None
    progress.heard({0: 100})
    progress.advance(0, 4)
    assert progress.unready(0) == "still reading the log: partition 0 at 4 of 5"
    progress.advance(0, 5)
    assert progress.unready() is None, "what came since is no reason to wait"
    progress.follow(0, goal=90, applied=0)  # it begins again
    assert progress.unready() == "still reading the log: partition 0 at 0 of 90"


def test_after_10_seconds_without_kafka() -> None:
    clock = ManualClock()
    progress = Progress(clock)
    progress.wait_for(None)
    progress.follow(0, goal=0, applied=0)
    clock.advance(SILENCE_SECONDS)
    assert progress.unready() is None
    clock.advance(1.5)
    assert progress.unready(0) == "nothing was heard from Kafka for 12 s"
    progress.heard({})
    assert progress.unready(0) is None
