"""The demo's stage: a Kafka, topics, two workers, a store; all of it found again by `--down`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.ports import Broker
from moebus.broker.topics import Topics, ensure
from moebus.cli._output import out
from moebus.cli.demo.processes import Processes
from moebus.observability.settings import Settings
from moebus.producers.control import ControlClient
from moebus.schemas.errors import RetriableError

WORKERS = 2
_STATE = "demo.json"


class NotReady(RetriableError):
    """Something of the demo did not become true in time; the text names it."""


class Stage:
    """Builds everything the story needs; `close` takes it all down again unless `keep`."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        run: str,
        *,
        keep: bool,
        own_kafka: bool = True,
        interrupted: Sequence[int] = (),
    ) -> None:
        """`own_kafka`: start one, else use that of the settings. `interrupted`: signals that came, of their handler."""
        self.directory = directory
        self.run = run
        self.keep = keep
        self._settings = settings
        self._own_kafka = own_kafka
        self._interrupted = interrupted
        self.topics = Topics(settings.topic_prefix)
        self.broker: Broker
        self.processes: Processes
        self.address = settings.kafka.bootstrap_servers
        self.urls: dict[str, str] = {}
        """Process name -> base URL of its page."""

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal came: Python drops what a handler raises inside some callbacks."""
        if self._interrupted:
            raise KeyboardInterrupt

    def start_kafka(self, progress: Callable[[str], None]) -> str:
        """Starts a Kafka, or uses that of the settings. Returns its address."""
        kafka = self._settings.kafka
        if self._own_kafka:
            cluster = LocalCluster.start(
                self.directory / "kafka", name="demo", die_with_parent=not self.keep, progress=progress
            )
            kafka = kafka.model_copy(update={"bootstrap_servers": cluster.bootstrap})
        self.broker = open_broker(kafka)
        admin = self.broker.admin()
        ensure(admin, self.topics)
        admin.close()
        self.processes = Processes(self.directory, kafka.bootstrap_servers, self.topics.prefix, keep=self.keep)
        self.address = kafka.bootstrap_servers
        return self.address

    def start_processes(self, weights: Path, *, seed: int, version: str) -> None:
        """Two workers, each beside a Paddle engine of its own, and a store."""
        names = [f"worker-{n}-{self.run[-4:]}" for n in range(1, WORKERS + 1)]
        for name in names:
            self.processes.start(
                name, "worker", "--engine", "paddle", "--worker-id", name, "--label", "role=rollout",
                "--run", self.run, "--weight-root", str(weights), "--seed", str(seed), "--version", version,
            )  # fmt: skip
        self.processes.start("store", "store", "--data-dir", str(self.directory / "store"), "--store-id", self.store_id)
        self._save()

    @property
    def store_id(self) -> str:
        return f"store-{self.run[-4:]}"

    def wait_ready(self, control: ControlClient, timeout: float) -> None:
        """Until every process says in members that it is ready; fills `urls`."""
        wanted = {running.name for running in self.processes.running if running.name != "store"} | {self.store_id}

        def ready() -> bool:
            found = {
                m.member_id: m.state
                for m in control.members()
                if m.live and m.state.ready and (m.state.url or m.state.http)
            }
            if wanted <= set(found):
                self.urls = {name: str(found[name].url or found[name].http) for name in sorted(wanted)}
            return bool(self.urls)

        self.wait(ready, "every process to be ready", timeout)
        self._save()

    def wait(self, condition: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
        """Raises NotReady naming `what` after `timeout` seconds, ProcessDied if a process ends meanwhile."""
        deadline = time.monotonic() + timeout
        while not condition():
            self.check()
            self.processes.check()
            if time.monotonic() > deadline:
                raise NotReady(f"waited {timeout:.0f} s for {what}; the logs are in {self.directory}")
            time.sleep(0.05)

    def close(self) -> None:
        """Ends everything that was started, whatever fails on the way; with `keep` only this process's connections."""
        with contextlib.ExitStack() as steps:  # runs from the last to the first
            if not self.keep:
                steps.callback((self.directory / _STATE).unlink, missing_ok=True)
                steps.callback(self._stop_kafka)
                if hasattr(self, "processes"):
                    steps.callback(self.processes.stop)
            if hasattr(self, "broker"):
                steps.callback(self.broker.close)

    def _stop_kafka(self) -> None:
        # Found on disk, not in a field: an interrupt may have come while it was starting.
        cluster = LocalCluster.load(self.directory / "kafka")
        if cluster is not None:
            cluster.stop()

    def _save(self) -> None:
        state = {"pids": {r.name: r.process.pid for r in self.processes.running}, "urls": self.urls, "run": self.run}
        (self.directory / _STATE).write_text(json.dumps(state))


def how_to_look(stage: Stage) -> None:
    out.print("\nStill running. Look at it with:")
    out.print(f"  export MOEBUS_KAFKA__BOOTSTRAP_SERVERS={stage.address} MOEBUS_TOPIC_PREFIX={stage.topics.prefix}")
    out.print("  .venv/bin/moebus workers        .venv/bin/moebus control history")
    for name, url in stage.urls.items():
        out.print(f"  curl {url}/metrics    # {name}")
    out.print(f"Logs and data: {stage.directory}.  End it with: .venv/bin/moebus demo --down")


def fresh_directory(directory: Path) -> Path:
    """Empties the demo's folder (an earlier demo's data) and returns it; takes down what was kept running."""
    take_down(directory)
    if (directory / _MARKER).exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MARKER).touch()
    return directory


def take_down(directory: Path) -> list[str]:
    """Ends what a demo with `--keep` left running; returns the names."""
    ended: list[str] = []
    state = directory / _STATE
    if state.exists():
        pids = {name: pid for name, pid in json.loads(state.read_text())["pids"].items() if _is_ours(pid)}
        _end(list(pids.values()))  # before Kafka: they say goodbye through it
        ended.extend(pids)
        state.unlink()
    cluster = LocalCluster.load(directory / "kafka")
    if cluster is not None and cluster.running():
        cluster.stop()
        ended.append("kafka")
    return ended


def _end(pids: Sequence[int]) -> None:
    """SIGTERM, and SIGKILL to what still runs after a while; returns once they are gone."""
    for number, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, _GRACE_SECONDS)):
        for pid in filter(_is_ours, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while any(map(_is_ours, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)


_MARKER = ".moebus-demo"
_GRACE_SECONDS = 20.0


def _is_ours(pid: int) -> bool:
    """Whether a process id still belongs to a moebus command (ids are used again)."""
    try:
        return b"moebus.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
