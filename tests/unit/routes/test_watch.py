"""Who watches the publisher's child: silence and failures to start."""

from __future__ import annotations

import os
import threading

from moebus.observability.clock import ManualClock
from moebus.producers.routing.process import protocol
from moebus.producers.routing.process.watch import SILENCE, Watch
from tests.support.wait import wait_until


class Silent:
    """A child that says one thing and then hangs until it is killed."""

    def __init__(self) -> None:
        self.acks, self._write = os.pipe()
        self.killed = threading.Event()
        os.write(self._write, protocol.BEAT)

    pid = 0

    def ring(self) -> None: ...

    def hang_up(self) -> None: ...

    def kill(self) -> None:
        if not self.killed.is_set():
            self.killed.set()
            os.close(self._write)

    def ended(self) -> bool:
        return self.killed.is_set()

    def reap(self, timeout: float) -> int | None:
        assert self.killed.is_set()
        os.close(self.acks)
        return -9


def test_a_silent_child_is_killed_and_replaced() -> None:
    clock, children, restarts = ManualClock(), list[Silent](), list[int]()

    def spawn() -> Silent:
        children.append(Silent())
        return children[-1]

    watch = Watch(spawn, lambda seq, outcome: None, lambda: restarts.append(1), clock)
    wait_until(lambda: watch.problem() is None, 30, "a sign of life")
    clock.advance(SILENCE + 1)
    wait_until(lambda: len(children) == 2, 30, "another child")
    assert children[0].killed.is_set()
    assert restarts == [1]
    watch.stop(kill=True)
    assert children[1].killed.is_set()


def test_a_child_that_does_not_end_when_it_should_is_killed() -> None:
    clock, child = ManualClock(), Silent()
    watch = Watch(lambda: child, lambda seq, outcome: None, lambda: None, clock)
    wait_until(lambda: watch.problem() is None, 30, "a sign of life")
    stopper = threading.Thread(target=watch.stop, args=(False,))
    stopper.start()
    wait_until(lambda: _advance(clock, stopper), 30, "the end")
    assert child.killed.is_set()


def _advance(clock: ManualClock, stopper: threading.Thread) -> bool:
    clock.advance(1)
    return not stopper.is_alive()


def test_a_child_that_cannot_start_is_a_problem_and_is_tried_again() -> None:
    tries = list[int]()

    def spawn() -> Silent:
        tries.append(1)
        raise OSError("no such program")

    watch = Watch(spawn, lambda seq, outcome: None, lambda: None, ManualClock())
    wait_until(lambda: len(tries) >= 2, 30, "a second try")
    assert "no such program" in (watch.problem() or "")
    watch.stop(kill=False)
