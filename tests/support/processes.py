"""Real `moebus` processes for acceptance and chaos tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.wait import wait_until


@dataclass
class Service:
    """A running `moebus` command; `log` holds its stdout and stderr."""

    arguments: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill9(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def terminate(self, timeout: float = 15.0) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def alive(self) -> bool:
        return self.process.poll() is None

    def publisher_pid(self) -> int:
        """Of the process that sends this worker's routes; 0 while there is none."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.pid and b"moebus RoutingPublisher" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        return 0

    def wait_exit(self, timeout: float) -> int:
        return self.process.wait(timeout)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_log(self, piece: str, timeout: float = 30.0) -> None:
        def seen() -> bool:
            assert self.alive() or piece in self.text(), f"ended early:\n{self.text()[-3000:]}"
            return piece in self.text()

        wait_until(seen, timeout, f"{piece!r} in {self.log.name}")


@dataclass
class Launcher:
    """Starts `moebus` commands against one broker and prefix; `close` ends what is left."""

    directory: Path
    bootstrap: str
    prefix: str
    services: list[Service] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        base = [sys.executable, "-m", "moebus.cli", "--bootstrap-servers", self.bootstrap]
        return [*base, "--topic-prefix", self.prefix, *arguments]

    def run(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=timeout, check=False, env=_environment()
        )

    def start(self, name: str, *arguments: str) -> Service:
        log = self.directory / f"{name}-{len(self.services)}.log"
        command = [*self.command(*arguments), "--parent-pid", str(os.getpid())]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment()
            )
        service = Service(arguments, log, process)
        self.services.append(service)
        return service

    def worker(self, worker_id: str, *arguments: str) -> Service:
        """A worker beside a simulated engine."""
        return self.start(
            worker_id, "worker", "--engine", "simulated", "--worker-id", worker_id,
            "--label", "role=rollout", "--weight-root", str(self.directory), *arguments,
        )  # fmt: skip

    def store(self, store_id: str = "store-1", *arguments: str) -> Service:
        return self.start(
            store_id, "store", "--data-dir", str(self.directory / store_id), "--store-id", store_id, *arguments
        )

    def close(self) -> None:
        for service in self.services:
            if service.alive():
                service.kill9()


@contextlib.contextmanager
def launcher(directory: Path, bootstrap: str, prefix: str) -> Iterator[Launcher]:
    made = Launcher(directory, bootstrap, prefix)
    try:
        yield made
    finally:
        made.close()


def _environment() -> dict[str, str]:
    """Without the developer's settings. Journals are small; who has lost its worker and its Kafka ends."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MOEBUS_")}
    return {**kept, "MOEBUS_PUBLISHER__MAX_BYTES": str(16 << 20), "MOEBUS_PUBLISHER__ORPHAN_SECONDS": "5"}


def kcat(bootstrap: str, *arguments: str, stdin: bytes | None = None, timeout: float = 30.0) -> bytes:
    """Runs kcat, the client that is not ours; its stdout."""
    done = subprocess.run(
        ["kcat", "-b", bootstrap, *arguments], input=stdin, capture_output=True, timeout=timeout, check=True
    )
    return done.stdout


def listening(pid: int) -> set[str]:
    """Local addresses (hex, as in /proc/net/tcp) on which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                found.add(parts[1].split(":")[0])
    return found
