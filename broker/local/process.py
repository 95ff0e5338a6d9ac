"""Processes by (pid, start time): a pid alone may belong to somebody else by the time it is looked at."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moebus.broker.local.errors import LocalKafkaError

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Kept so that a child that ended is reaped."""


@atexit.register
def _leave() -> None:
    """A broker that outlives us is meant to; Python would report it as leaked."""
    for child in _children.values():
        if child.poll() is None:
            child.returncode = 0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process. `start`: clock ticks after boot at which it started."""

    pid: int
    start: int

    @staticmethod
    def of(pid: int) -> ProcessId | None:
        """The running process that has `pid` now, or None."""
        start = _start_ticks(pid)
        return None if start is None else ProcessId(pid, start)

    def alive(self) -> bool:
        child = _children.get(self.pid)
        if child is not None and child.poll() is not None:
            del _children[self.pid]
        return _start_ticks(self.pid) == self.start

    def signal(self, number: int) -> None:
        """Sends a signal; nothing happens when the process is gone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself: count fields from the last one.
    fields = stat[stat.rindex(")") + 2 :].split()
    # A zombie whose other threads still run (after SIGKILL to a JVM) still holds its ports.
    ended = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
    return None if ended else int(fields[19])


def tagged(tag: str) -> list[ProcessId]:
    """Running processes that have an argument starting with `tag`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if any(argument.startswith(os.fsencode(tag)) for argument in arguments):
                process = ProcessId.of(int(entry.name))
                if process is not None:
                    found.append(process)
    return found


def spawn(arguments: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> ProcessId:
    """Starts a process in a session of its own (Ctrl-C here does not reach it), its output appended to `log`."""
    with log.open("ab") as output:
        try:
            child = subprocess.Popen(
                list(arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise LocalKafkaError(f"cannot run {arguments[0]}: {error}") from error
    _children[child.pid] = child
    # A child that has ended already still has its entry until it is reaped; 0 then never matches.
    return ProcessId.of(child.pid) or ProcessId(child.pid, 0)


def wait_gone(processes: Iterable[ProcessId], timeout: float) -> bool:
    """True once none of them runs; False after `timeout` seconds."""
    left = list(processes)
    deadline = time.monotonic() + timeout
    while left := [process for process in left if process.alive()]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def end(processes: Sequence[ProcessId], grace: float) -> bool:
    """SIGTERM, then SIGKILL for what runs after `grace` seconds. True when all ended by themselves."""
    for process in processes:
        process.signal(signal.SIGTERM)
    if wait_gone(processes, grace):
        return True
    kill(processes)
    return False


def kill(processes: Sequence[ProcessId]) -> None:
    """SIGKILL, and waits until they are gone."""
    for process in processes:
        process.signal(signal.SIGKILL)
    if not wait_gone(processes, 10):
        alive = ", ".join(str(process.pid) for process in processes if process.alive())
        raise LocalKafkaError(f"process {alive} is still there 10 s after SIGKILL; look at it with `ps`")
