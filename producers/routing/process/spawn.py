"""Starts the child as a program of its own: it works where `multiprocessing` does not (daemonic processes, actors)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Protocol

BOOT = """# the child of a moebus RoutingPublisher
import json, sys
paths = json.loads(sys.argv.pop())
sys.path[:] = [path for path in sys.path if path] + [path for path in paths if path not in sys.path]
from moebus.producers.routing.process.program import main
sys.exit(main(sys.argv[1:]))
"""
"""Modules are looked for where this process has them, but after Python's own: a `queue.py` beside the user's script
must not end up in the child's imports."""


LOOK, END = b"\n", b"."
"""Rings of the bell: there is something new; nothing more comes. (A fork of the publisher may hold the pipe open, so
that closing it is not seen.)"""


class Running(Protocol):
    """A child as the publisher sees it."""

    @property
    def acks(self) -> int:
        """Descriptor to read its lines from."""
        ...

    @property
    def pid(self) -> int: ...

    def ring(self) -> None:
        """There is something new in the journal. Returns at once, also when the child is stuck or gone."""
        ...

    def hang_up(self) -> None:
        """Nothing more comes: it ends once all is settled."""
        ...

    def kill(self) -> None: ...

    def ended(self) -> bool: ...

    def reap(self, timeout: float) -> int | None:
        """Its exit code, None while it runs; closes what is open when it has ended."""
        ...


class ChildProcess:
    """See `Running`."""

    def __init__(self, journal_fd: int, owner: bytes, config: bytes) -> None:
        """`owner`: as it stands in the journal. Raises OSError where no process can be started."""
        bell_read, self._bell = os.pipe()
        self.acks, acks_write = os.pipe()
        self._lock = threading.Lock()
        self._open = True
        os.set_blocking(self._bell, False)
        given = (journal_fd, bell_read, acks_write)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, *map(str, given), str(os.getpid()), owner.hex(), _paths()],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=given,
                start_new_session=True,  # a Ctrl-C at the terminal is the publisher's business
            )  # fmt: skip
        except BaseException:
            os.close(self._bell)
            os.close(self.acks)
            raise
        finally:
            os.close(bell_read)
            os.close(acks_write)
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as stdin:  # it may have died already
            stdin.write(config)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ring(self) -> None:
        with self._lock, suppress(OSError):  # full: it has not looked yet; broken: it is gone
            if self._open:
                os.write(self._bell, LOOK)

    def hang_up(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                with suppress(OSError):
                    os.write(self._bell, END)
                os.close(self._bell)

    def kill(self) -> None:
        self._process.kill()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def reap(self, timeout: float) -> int | None:
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self.hang_up()
        if self.acks >= 0:
            os.close(self.acks)
            self.acks = -1
        return code


def _paths() -> str:
    """Where this process looks for modules, however that came about."""
    return json.dumps([os.path.abspath(path) for path in sys.path if os.path.exists(path)])
