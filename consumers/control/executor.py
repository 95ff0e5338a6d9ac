"""The thread on which one worker touches its engine, so that heartbeats and `status` never wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from moebus.consumers.control.journal import Stopped
from moebus.observability.log import get_logger

Job = Callable[[], None]
_log = get_logger(__name__)


class Executor:
    """Jobs in order, one at a time. `before` runs ahead of each. Without `start`, `run_pending` does the work."""

    def __init__(self, name: str, before: Job) -> None:
        self._name = name
        self._before = before
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running = False
        self._stop = False
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def put(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        with self._changed:
            return not self._running and not self._jobs

    @property
    def waiting(self) -> int:
        with self._changed:
            return len(self._jobs)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name=f"worker-{self._name}", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """No further job begins; True once the one that runs has ended."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def run_pending(self) -> None:
        """Runs what waits, on this thread."""
        while self._take(block=False):
            pass

    def _loop(self) -> None:
        try:
            while self._take(block=True):
                pass
        except Stopped as stopped:
            _log.info("control.worker_stopped", str(stopped), worker_id=self._name)
        except BaseException as error:
            self.error = error
            _log.error("control.worker_failed", str(error), exc=error, worker_id=self._name)

    def _take(self, *, block: bool) -> bool:
        with self._changed:
            while block and not self._jobs and not self._stop:
                self._changed.wait()
            if self._stop or not self._jobs:
                return False
            job = self._jobs.popleft()
            self._running = True
        try:
            self._before()
            job()
        finally:
            with self._changed:
                self._running = False
        return True
