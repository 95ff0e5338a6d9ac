"""The state file, processes by pid and start time, the lock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moebus.broker.local import LocalCluster, LocalKafkaError, process, state
from moebus.broker.local.lock import file_lock
from moebus.broker.local.process import ProcessId
from moebus.broker.local.state import ClusterState, Node


def _state(directory: Path, of: ProcessId | None) -> ClusterState:
    nodes = (Node(1, 20001, 21001, directory / "node-1", of),)
    return ClusterState("test", "id", "4.4.0", nodes, watcher=of, recording=Path("/c/a.tmp"), archive=None)


@pytest.fixture
def ended() -> ProcessId:
    """A process that has ended and was reaped."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return ProcessId(child.pid, 1)


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[ProcessId]:
    found = process.spawn(
        [sys.executable, "-c", "import time; time.sleep(60)", f"-Dtag={tmp_path}/n"], tmp_path / "log"
    )
    yield found
    process.kill([found])


_LEAVES = """
import sys
from pathlib import Path
from moebus.broker.local import process
left = process.spawn([sys.executable, "-c", "import time; time.sleep(60)"], Path(sys.argv[1]))
print(left.pid, left.start)
"""


def test_a_broker_that_outlives_us_is_not_reported_as_leaked(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", _LEAVES, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    left = ProcessId(*map(int, done.stdout.split()))
    assert left.alive()
    process.kill([left])
    assert done.stderr == ""


def test_round_trip(tmp_path: Path) -> None:
    written = _state(tmp_path, ProcessId(12, 3456))
    state.save(tmp_path, written)
    assert state.load(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_no_state(tmp_path: Path) -> None:
    assert state.load(tmp_path) is None
    assert LocalCluster.load(tmp_path / "absent") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "nodes": 3}'])
def test_damaged_state_names_the_file(tmp_path: Path, text: str) -> None:
    state.state_file(tmp_path).write_text(text)
    with pytest.raises(LocalKafkaError, match=r"cluster\.json is damaged"):
        state.load(tmp_path)


def test_a_dead_pid_is_not_running(tmp_path: Path, ended: ProcessId) -> None:
    state.save(tmp_path, _state(tmp_path, ended))
    cluster = LocalCluster.load(tmp_path)
    assert cluster is not None
    assert not cluster.running()


def test_a_pid_that_belongs_to_another_process_by_now_is_not_running(tmp_path: Path) -> None:
    us = ProcessId.of(os.getpid())
    assert us is not None
    assert _state(tmp_path, us).nodes[0].alive()
    assert not _state(tmp_path, ProcessId(us.pid, us.start - 1)).nodes[0].alive()


def test_stopping_a_stale_state_touches_nobody(tmp_path: Path) -> None:
    us = ProcessId.of(os.getpid())
    assert us is not None
    state.save(tmp_path, _state(tmp_path, ProcessId(us.pid, us.start - 1)))
    cluster = LocalCluster.load(tmp_path)
    assert cluster is not None
    assert cluster.stop()
    assert cluster.nodes[0].process is None


def test_processes_are_found_by_their_tag(tmp_path: Path, sleeper: ProcessId) -> None:
    assert process.tagged(f"-Dtag={tmp_path}/") == [sleeper]
    assert process.tagged(f"-Dtag={tmp_path}/other") == []


def test_end_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    deaf = process.spawn([sys.executable, "-c", code], tmp_path / "log")
    while "deaf" not in (tmp_path / "log").read_text():
        assert deaf.alive()
    assert not process.end([deaf], grace=0.05)
    assert not deaf.alive()


def test_end_is_gentle_where_it_can_be(sleeper: ProcessId) -> None:
    assert process.end([sleeper], grace=10)
    assert not sleeper.alive()


def test_a_program_that_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(LocalKafkaError, match="cannot run /no/such/java"):
        process.spawn(["/no/such/java"], tmp_path / "log")


def test_lock_is_exclusive(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "lock"
    with file_lock(path), pytest.raises(LocalKafkaError, match="another process has held"), file_lock(path, timeout=0):
        pass
    with file_lock(path, timeout=0):
        assert path.exists()


@pytest.mark.parametrize(
    ("directory", "nodes", "reason"), [("x", 2, "nodes: 2 is not 1 or 3"), ("a,b", 1, "Kafka takes a comma")]
)
def test_wrong_use(tmp_path: Path, directory: str, nodes: int, reason: str) -> None:
    with pytest.raises(LocalKafkaError, match=reason):
        LocalCluster.start(tmp_path / directory, nodes)
    assert list(tmp_path.iterdir()) == []
