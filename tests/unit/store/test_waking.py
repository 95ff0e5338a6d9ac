"""A request that waits is woken by a commit, not by a clock."""

from __future__ import annotations

import asyncio
import threading

import pytest

from moebus.consumers.store import waking
from moebus.consumers.store.progress import Progress
from moebus.consumers.store.waking import Changes
from moebus.observability.clock import SystemClock
from moebus.schemas.rollout import RolloutKey

KEY = RolloutKey("run", "a:1:0:0")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not woken looks by itself too late for these tests."""
    monkeypatch.setattr(waking, "LONGEST", 60.0)


def test_a_commit_on_another_thread_wakes_it() -> None:
    progress = Progress(SystemClock())
    progress.follow(0, 5, 0)

    async def main() -> None:
        with Changes(progress, 0, KEY) as changes:
            changes.clear()
            progress.follow(1, 5, 0)
            thread = threading.Thread(target=lambda: progress.advance(0, 5))
            waiting = asyncio.ensure_future(changes.wait(60))
            await asyncio.sleep(0)
            thread.start()
            await asyncio.wait_for(waiting, 30)
            thread.join()

    asyncio.run(main())


def test_a_commit_between_the_question_and_the_wait_is_not_missed() -> None:
    progress = Progress(SystemClock())
    progress.follow(0, 5, 0)

    async def main() -> None:
        with Changes(progress, None, KEY) as changes:
            changes.clear()
            progress.advance(0, 5)
            await asyncio.wait_for(changes.wait(60), 30)

    asyncio.run(main())


def test_nobody_listens_any_more_afterwards() -> None:
    progress = Progress(SystemClock())
    calls: list[int] = []
    stop = progress.listen(lambda number, _: calls.append(number))
    progress.follow(0, 5, 0)
    stop()
    progress.advance(0, 1)
    assert calls == [0], "the partition's number"

    async def main() -> Changes:
        with Changes(progress, None, KEY) as changes:
            await changes.wait(0.0)
        return changes

    asyncio.run(main())
    progress.advance(0, 2)  # the loop is gone: nothing to call
    assert progress.lags()[0].applied == 2


def test_other_partitions_wake_nobody() -> None:
    progress = Progress(SystemClock())
    progress.follow(0, 5, 0)
    progress.follow(1, 5, 0)

    async def main() -> None:
        with Changes(progress, 0, KEY) as changes:
            changes.clear()
            progress.advance(1, 5)
            waiting = asyncio.ensure_future(changes.wait(60))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not waiting.done()
            progress.advance(0, 5)
            await asyncio.wait_for(waiting, 30)

    asyncio.run(main())


def test_before_its_commit_a_rollout_wakes_only_those_who_wait_for_it() -> None:
    progress = Progress(SystemClock())
    progress.follow(0, 5, 0)

    async def main() -> None:
        with Changes(progress, 0, KEY) as mine, Changes(progress, None, RolloutKey("run", "b")) as other:
            waiting = [asyncio.ensure_future(changes.wait(60)) for changes in (mine, other)]
            progress.readable(1, KEY)  # another partition: not the one asked for
            progress.readable(0, KEY)
            await asyncio.wait_for(waiting[0], 30)
            assert not waiting[1].done()
            progress.advance(0, 5)
            await asyncio.wait_for(waiting[1], 30)

    asyncio.run(main())
