"""The thread that keeps a child running and hears what it says."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.producers.routing.parcel import Sent
from moebus.producers.routing.process import protocol
from moebus.producers.routing.process.spawn import Running

SILENCE = 60.0
"""Seconds without a sign of life after which a child is replaced."""
END_SECONDS = 10.0
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 5.0
_log = get_logger(__name__)


class Watch:
    """Starts children, one at a time, until `stop`."""

    def __init__(
        self,
        spawn: Callable[[], Running],
        heard: Callable[[int, Sent | Exception], None],
        restarted: Callable[[], None],
        clock: Clock,
    ) -> None:
        """`heard(seq, outcome)` and `restarted()` are called on this thread."""
        self._spawn = spawn
        self._heard = heard
        self._restarted = restarted
        self._clock = clock
        self._child: Running | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._kill = False
        self._stopped_at = 0.0
        self._progress = False
        self._trouble: str | None = "the publisher's process is starting"
        self._thread = threading.Thread(target=self._run, name="moebus-publisher", daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """Something new is in the journal."""
        child = self._child
        if child is not None:
            child.ring()

    @property
    def pid(self) -> int | None:
        """Of the child that runs now."""
        child = self._child
        return None if child is None else child.pid

    def problem(self) -> str | None:
        return self._trouble

    def stop(self, kill: bool) -> None:
        """Ends the child, at once or when it has settled everything, and this thread. All it said has been heard."""
        with self._lock:
            self._kill, self._stopped_at = kill, self._clock.monotonic()
            self._stopping.set()
            if self._child is not None:
                self._dismiss(self._child)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            self._progress = False
            if self._start():
                self._listen()
                self._bury()
            if self._stopping.is_set():
                return
            self._restarted()
            pause = _FIRST_PAUSE if self._progress else min(_LAST_PAUSE, pause * 2)
            self._stopping.wait(pause)

    def _start(self) -> bool:
        try:
            child = self._spawn()
        except OSError as exc:
            self._trouble = f"the publisher's process cannot be started: {exc}"
            _log.error("routes.child_failed", self._trouble)
            return False
        with self._lock:
            self._child = child
            if self._stopping.is_set():  # stopped in between: nobody told this one
                self._dismiss(child)
        child.ring()
        return True

    def _dismiss(self, child: Running) -> None:
        if self._kill:
            child.kill()
        else:
            child.hang_up()

    def _listen(self) -> None:
        """Until the child closes its end or is silent for too long."""
        child = self._child
        assert child is not None
        rest, last, given_up = b"", self._clock.monotonic(), False
        while True:
            ready, _, _ = select.select([child.acks], [], [], 1.0)
            if ready:
                piece = os.read(child.acks, 1 << 16)
                if not piece:
                    return
                *lines, rest = (rest + piece).split(b"\n")
                self._take(lines)
                last = self._clock.monotonic()
            elif child.ended():  # a fork of this process holds the pipe open
                return
            if not given_up and self._overdue(last):
                given_up = True
                _log.error("routes.child_silent", f"process {child.pid} of the publisher is silent and is replaced")
                child.kill()

    def _overdue(self, last: float) -> bool:
        now = self._clock.monotonic()
        return now - self._stopped_at > END_SECONDS if self._stopping.is_set() else now - last > SILENCE

    def _take(self, lines: list[bytes]) -> None:
        for line in lines:
            said = protocol.heard(line)
            self._trouble = None
            if said is not None:
                self._progress = True
                self._heard(*said)

    def _bury(self) -> None:
        child = self._child
        assert child is not None
        code = child.reap(END_SECONDS)
        if code is None:
            child.kill()
            code = child.reap(END_SECONDS)
        with self._lock:
            self._child = None
        if not self._stopping.is_set():
            self._trouble = f"the publisher's process ended ({code}) and is started again"
            _log.warning("routes.child_ended", self._trouble, code=code)
