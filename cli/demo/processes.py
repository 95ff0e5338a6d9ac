"""The demo's processes: each the real `moebus` command, started, watched and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from moebus.schemas.errors import FatalError

_GRACE = 10.0
_SMALL = {"MOEBUS_PUBLISHER__MAX_BYTES": str(32 << 20), "MOEBUS_PUBLISHER__ORPHAN_SECONDS": "5"}
"""The demo's rollouts are small, and without its Kafka there is nobody to send to."""


class ProcessDied(FatalError):
    """A process of the demo ended by itself; the text has the end of its log."""


@dataclass
class Running:
    """One process; its output goes to `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raises ProcessDied if it has ended."""
        code = self.process.poll()
        if code is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise ProcessDied(f"{self.name} ended with exit code {code}; the end of {self.log}:\n{tail}")


class Processes:
    """Starts `moebus ...` commands and ends them all, newest first."""

    def __init__(self, directory: Path, bootstrap: str, prefix: str, *, keep: bool) -> None:
        """`keep`: they outlive this process; otherwise they end with it, also when it is killed."""
        self._directory = directory
        self._keep = keep
        self._base = [sys.executable, "-m", "moebus.cli", "--bootstrap-servers", bootstrap, "--topic-prefix", prefix]
        self.running: list[Running] = []

    def start(self, name: str, *arguments: str) -> Running:
        """Starts one command in the background."""
        log = self._directory / f"{name}.log"
        command = [*self._base, *arguments]
        if not self._keep:
            command += ["--parent-pid", str(os.getpid())]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**_SMALL, **os.environ},
            )  # fmt: skip
        running = Running(name, process, log)
        self.running.append(running)
        return running

    def check(self) -> None:
        """Raises ProcessDied for the first one that has ended."""
        for running in self.running:
            running.check()

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what is left after 10 s."""
        for running in reversed(self.running):
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        for running in self.running:
            try:
                running.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        self.running.clear()
