"""The local Kafka runner against the real thing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster, LocalKafkaError, process
from moebus.broker.local.properties import TAG
from moebus.broker.ports import LogRecord, OutRecord, TopicPartition
from tests.support.wait import wait_until

pytestmark = pytest.mark.kafka
TOPIC = "kept"
TP = TopicPartition(TOPIC, 0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, kafka_broker: LocalCluster) -> Iterator[LocalCluster]:
    """One node of this module's own. The shared broker comes first: it skips where there is no Java."""
    with LocalCluster.start(tmp_path_factory.mktemp("kafka"), die_with_parent=True) as started:
        yield started


def _write(bootstrap: str, values: list[bytes]) -> None:
    broker = open_broker(bootstrap)
    try:
        broker.admin().create(TOPIC, partitions=1, replication=1, config={})
        writer = broker.writer("test")
        for receipt in [writer.append(OutRecord(TOPIC, value, partition=0)) for value in values]:
            receipt.result(60)
    finally:
        broker.close()


def _read(bootstrap: str, count: int) -> list[bytes | None]:
    broker = open_broker(bootstrap)
    found: list[LogRecord] = []
    try:
        reader = broker.reader("test")
        reader.assign({TP: 0})

        def enough() -> bool:
            found.extend(reader.poll(0.5))
            return len(found) >= count

        wait_until(enough, 60, f"{count} records")
    finally:
        broker.close()
    return [record.value for record in found]


def _listening(pid: int) -> set[str]:
    """Hexadecimal addresses at which the process listens, as /proc/net writes them."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own}


def test_the_shared_broker_serves_on_loopback_only(kafka_broker: LocalCluster) -> None:
    node = kafka_broker.nodes[0]
    assert node.pid is not None
    assert kafka_broker.bootstrap == f"127.0.0.1:{node.port}"
    assert _listening(node.pid) == {"0100007F"}


def test_start_of_a_running_one_returns_it(cluster: LocalCluster) -> None:
    again = LocalCluster.start(cluster.directory)
    assert again.already_up
    assert again.nodes == cluster.nodes
    with pytest.raises(LocalKafkaError, match="holds a cluster of size 1, not 3"):
        LocalCluster.start(cluster.directory, 3)


def test_kill_9_and_restart_keep_ports_and_data(cluster: LocalCluster) -> None:
    values = [b"%d" % i for i in range(50)]
    bootstrap, pid = cluster.bootstrap, cluster.nodes[0].pid
    _write(bootstrap, values)
    cluster.kill(1)
    assert not cluster.running()
    cluster.restart(1)
    assert cluster.running()
    assert cluster.bootstrap == bootstrap
    assert cluster.nodes[0].pid != pid
    assert _read(bootstrap, 50) == values


def test_stop_of_a_frozen_node_and_next_start(cluster: LocalCluster, kafka_broker: LocalCluster) -> None:
    """The next start loads the class archive, and takes another port where the shared broker has the old one."""
    cluster.freeze(1)
    assert cluster.running()
    assert cluster.stop()
    assert process.tagged(f"{TAG}{cluster.directory}/") == []

    path, taken = cluster.directory / "cluster.json", kafka_broker.nodes[0].port
    path.write_text(path.read_text().replace(f'"port": {cluster.nodes[0].port}', f'"port": {taken}'))
    again = LocalCluster.start(cluster.directory, die_with_parent=True)
    node, archive = again.nodes[0], again.state.archive
    assert again.running()
    assert node.port != taken
    assert archive is not None
    if archive.exists():  # not where Java comes without the base archive that ours builds on
        assert str(archive) in Path(f"/proc/{node.pid}/maps").read_text()


def test_kill_9_of_the_owner_leaves_no_broker(tmp_path: Path, kafka_broker: LocalCluster) -> None:
    directory = tmp_path / "kafka"
    code = (
        "import sys, pathlib, time; from moebus.broker.local import LocalCluster\n"
        "LocalCluster.start(pathlib.Path(sys.argv[1]), die_with_parent=True); print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        nodes = process.tagged(f"{TAG}{directory}/")
        assert len(nodes) == 1
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not process.tagged(f"{TAG}{directory}/"), 10, "the broker is gone")
    left = LocalCluster.load(directory)
    assert left is not None
    wait_until(lambda: not left.running(), 10, "the state file says so")
    assert left.state.watcher is not None
    wait_until(lambda: left.state.watcher and not left.state.watcher.alive(), 10, "the watcher is gone")
