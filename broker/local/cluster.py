"""A real Apache Kafka (KRaft) on loopback: start, look at, hurt and stop it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from moebus.broker.local import archive, state
from moebus.broker.local.errors import LocalKafkaError, read_log
from moebus.broker.local.jars import ensure_jars
from moebus.broker.local.java import find_java
from moebus.broker.local.launch import Launcher, new_cluster_id
from moebus.broker.local.lock import file_lock
from moebus.broker.local.paths import KAFKA_VERSION, cache_directory
from moebus.broker.local.ports import becomes_free, free_ports, is_free
from moebus.broker.local.process import ProcessId, end, kill, tagged
from moebus.broker.local.properties import TAG
from moebus.broker.local.ready import NodeEnded, wait_ready
from moebus.broker.local.state import ClusterState, Node
from moebus.broker.local.watch import watch_for

Progress = Callable[[str], None]
HEAP_MB = {1: 512, 3: 384}
START_TIMEOUT = 120.0
STOP_GRACE = 20.0


def _silent(_: str) -> None:
    return


class LocalCluster:
    """A local Kafka of one node or three. State, data and logs lie in `directory`, where every process finds them.

    As a context manager it stops the cluster at the end.
    """

    def __init__(self, directory: Path, current: ClusterState, *, already_up: bool = False) -> None:
        self.directory = directory
        self.already_up = already_up
        self._state = current

    # -- making one ---------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        directory: Path,
        nodes: int = 1,
        *,
        name: str = "local",
        die_with_parent: bool = False,
        owner: int | None = None,
        prefer_port: int | None = None,
        timeout: float = START_TIMEOUT,
        progress: Progress = _silent,
    ) -> LocalCluster:
        """Starts a cluster and returns when every node serves; returns the one that is up if there is one.

        nodes: 1 or 3. die_with_parent: kill -9 of this process (of the process `owner`, if given) leaves no broker.
        prefer_port: of the first node, taken if it is free. timeout: seconds for starting, without fetching the jars.

        Raises:
            ToolMissing: no Java, or no Maven and no jars.
            LocalKafkaError: it did not start; nothing is left running, and the text has the end of the log.
        """
        directory = _checked(directory, nodes)
        with file_lock(directory / "lock"):
            current = state.load(directory)
            if current and len(current.nodes) != nodes:
                raise LocalKafkaError(
                    f"{directory} holds a cluster of size {len(current.nodes)}, not {nodes}: choose another with "
                    "--dir, or throw its data away with `moebus broker down --delete-data`"
                )
            if current and all(node.alive() for node in current.nodes):
                return cls(directory, current, already_up=True)
            cluster = cls(directory, current or _new_state(directory, name, nodes, prefer_port))
            cluster._watch(owner if owner is not None else os.getpid() if die_with_parent else None)
            cluster._start_missing(timeout, progress)
            return cluster

    @classmethod
    def load(cls, directory: Path) -> LocalCluster | None:
        """The cluster whose state lies in `directory` (running or not), None when there never was one."""
        directory = directory.expanduser().absolute()
        current = state.load(directory)
        return None if current is None else cls(directory, current)

    # -- looking at it ------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def bootstrap(self) -> str:
        """`host:port,...` for a client's bootstrap servers."""
        return self._state.bootstrap

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in order: id (1, 2, ...), pid, port, controller_port, log, alive()."""
        return self._state.nodes

    @property
    def state(self) -> ClusterState:
        return self._state

    def running(self) -> bool:
        """Whether every node's process runs."""
        return all(node.alive() for node in self.nodes)

    # -- hurting it ---------------------------------------------------------------------------------------

    def kill(self, node: int = 1) -> None:
        """SIGKILL to a node, and waits until it is gone. Its ports and its data stay for `restart`."""
        with self._locked():
            victim = self._state.node(node)
            if victim.process:
                kill([victim.process])
            self._save(self._state.with_node(replace(victim, process=None)))

    def freeze(self, node: int = 1) -> None:
        """SIGSTOP: the node keeps its connections and answers nothing, until `thaw`."""
        self._signal(node, signal.SIGSTOP)

    def thaw(self, node: int = 1) -> None:
        """SIGCONT."""
        self._signal(node, signal.SIGCONT)

    def restart(self, node: int = 1, *, timeout: float = START_TIMEOUT, wait: bool = True) -> None:
        """SIGKILL to a node if it runs, then starts it on the same ports and data; waits until it serves.

        Raises:
            LocalKafkaError: it did not serve within `timeout` seconds, or another program has its port by now.
        """
        self.kill(node)
        with self._locked():
            victim = self._state.node(node)
            for port in (victim.port, victim.controller_port):
                if not becomes_free(port, 5.0):
                    raise LocalKafkaError(f"port {port} of Kafka node {node} is taken by another program: end it first")
            launcher = self._launcher()
            started = launcher.start(victim, archive.use_options(launcher.archive))
            self._save(self._state.with_node(started))
            if wait:
                wait_ready([started], self._living(), self._state.cluster_id, timeout)

    # -- ending it ----------------------------------------------------------------------------------------

    def stop(self, grace: float = STOP_GRACE) -> bool:
        """SIGTERM, after `grace` seconds SIGKILL. Data and logs stay. True when every node ended by itself.

        A second call does nothing and returns True.
        """
        with self._locked():
            return self._stop_locked(grace)

    def delete_data(self) -> None:
        """Deletes everything in `directory`; the cluster has to be stopped."""
        if any(node.alive() for node in self.nodes):
            raise LocalKafkaError(f"the cluster in {self.directory} runs: stop it first")
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- inside -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with file_lock(self.directory / "lock"):
            self._state = state.load(self.directory) or self._state  # another process may have changed it
            yield

    def _save(self, changed: ClusterState) -> None:
        self._state = changed
        state.save(self.directory, changed)

    def _signal(self, node: int, number: int) -> None:
        process = self._state.node(node).process
        if process:
            process.signal(number)

    def _living(self) -> frozenset[int]:
        return frozenset(node.id for node in self.nodes if node.alive())

    def _launcher(self, progress: Progress = _silent) -> Launcher:
        java = find_java()
        jars = ensure_jars(java, progress)
        return Launcher(java, jars, archive.archive_path(cache_directory(), java, jars), HEAP_MB[len(self.nodes)])

    def _watch(self, owner: int | None) -> None:
        if owner is None:
            return
        process = ProcessId.of(owner)
        if process is None:
            raise LocalKafkaError(f"owner: there is no process {owner}")
        if self._state.watcher:
            kill([self._state.watcher])
        self._save(replace(self._state, watcher=watch_for(process, self.directory)))

    def _start_missing(self, timeout: float, progress: Progress) -> None:
        try:
            launcher = self._launcher(progress)
            for attempt in range(3):
                try:
                    self._start_once(launcher, timeout, progress)
                    return
                except NodeEnded as error:
                    # Somebody took a port between our look at it and Kafka's bind.
                    if attempt == 2 or not _port_was_taken(error.node):
                        raise
                    progress("a port was taken meanwhile: trying others")
                    self._end_nodes(STOP_GRACE)
        except BaseException:
            self._stop_locked(grace=2)
            raise

    def _start_once(self, launcher: Launcher, timeout: float, progress: Progress) -> None:
        self._choose_ports()
        missing = [node for node in self.nodes if not node.alive()]
        for node in missing:
            if not (node.directory / "formatted").exists():
                progress(f"formatting the storage of node {node.id}")
            launcher.format(node, self.nodes, self._state.cluster_id)
        for node in missing:
            progress(f"starting node {node.id} on {node.address}")
            started = launcher.start(node, self._archive_options(launcher, node))
            self._save(self._state.with_node(started))
        wait_ready(self.nodes, self._living(), self._state.cluster_id, timeout)

    def _archive_options(self, launcher: Launcher, node: Node) -> list[str]:
        options = archive.use_options(launcher.archive)
        if not options and node.id == 1:
            recording = archive.recording_path(launcher.archive)
            options = archive.record_options(recording)
            self._save(replace(self._state, recording=recording))
        self._save(replace(self._state, archive=launcher.archive))
        return options

    def _choose_ports(self) -> None:
        """New ports for a cluster that is down, where the old ones are taken; a living cluster keeps its own."""
        if self._living():
            return
        # A node that died without its state file knowing (an interrupted start) still holds its data directory.
        kill(tagged(f"{TAG}{self.directory}/"))
        taken = [port for node in self.nodes for port in (node.port, node.controller_port)]
        for node in self.nodes:
            port, controller = free_ports(2, avoid=taken)
            port = node.port if is_free(node.port) else port
            controller = node.controller_port if is_free(node.controller_port) else controller
            taken += [port, controller]
            self._save(self._state.with_node(replace(node, port=port, controller_port=controller, process=None)))

    def _stop_locked(self, grace: float) -> bool:
        if self._state.watcher:
            kill([self._state.watcher])
        clean = self._end_nodes(grace)
        if self._state.recording and self._state.archive:
            archive.finish(self._state.recording, self._state.archive, clean)
        stopped = tuple(replace(node, process=None) for node in self.nodes)
        self._save(replace(self._state, nodes=stopped, watcher=None, recording=None))
        return clean

    def _end_nodes(self, grace: float) -> bool:
        processes = [node.process for node in self.nodes if node.process and node.alive()]
        for process in processes:
            process.signal(signal.SIGCONT)  # a frozen one would never see SIGTERM
        return end(processes, grace)


def _checked(directory: Path, nodes: int) -> Path:
    if not sys.platform.startswith("linux"):
        raise LocalKafkaError("a local Kafka needs Linux: use `docker compose up -d kafka`")
    if nodes not in HEAP_MB:
        raise LocalKafkaError(f"nodes: {nodes} is not 1 or 3")
    directory = directory.expanduser().absolute()
    if "," in str(directory):
        raise LocalKafkaError(f"{directory}: Kafka takes a comma in its data directory for a separator; choose another")
    with contextlib.suppress(FileExistsError):
        directory.mkdir(parents=True, mode=0o700)
    return directory


def _port_was_taken(node: Node) -> bool:
    return any("Address already in use" in line for line in read_log(node.log))


def _new_state(directory: Path, name: str, count: int, prefer_port: int | None) -> ClusterState:
    ports = free_ports(2 * count, avoid=[prefer_port] if prefer_port else [])
    if prefer_port and is_free(prefer_port):
        ports[0] = prefer_port
    nodes = tuple(Node(i + 1, ports[2 * i], ports[2 * i + 1], directory / f"node-{i + 1}") for i in range(count))
    return ClusterState(name, new_cluster_id(), KAFKA_VERSION, nodes)
