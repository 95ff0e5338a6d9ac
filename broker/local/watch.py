"""`python -m moebus.broker.local.watch OWNER_PID OWNER_START DIRECTORY`: kills a cluster when its owner dies.

A process of its own and not PR_SET_PDEATHSIG: that fires when the *thread* that started the broker ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from moebus.broker.local.process import ProcessId, spawn, tagged
from moebus.broker.local.properties import TAG


def watch_for(owner: ProcessId, directory: Path) -> ProcessId:
    """Starts the watcher of the cluster in `directory`."""
    arguments = [sys.executable, "-m", "moebus.broker.local.watch", str(owner.pid), str(owner.start), str(directory)]
    return spawn(arguments, directory / "watch.log")


def wait_for_end(owner: ProcessId) -> None:
    """Returns when `owner` runs no more."""
    try:
        descriptor = os.pidfd_open(owner.pid)
    except OSError:  # gone already, or a kernel without it
        descriptor = -1
    if descriptor >= 0 and owner.alive():
        select.select([descriptor], [], [])
    while owner.alive():
        time.sleep(0.1)


def main(arguments: list[str]) -> None:
    pid, start, directory = arguments
    wait_for_end(ProcessId(int(pid), int(start)))
    # By the tag and not by the state file: a node may have been started a moment before the owner died.
    while nodes := tagged(f"{TAG}{directory}/"):
        for node in nodes:
            node.signal(signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
