"""No broker: commands say so and end with 5, services wait, say so and recover."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from moebus.broker.local import LocalCluster
from tests.support.processes import launcher, listening
from tests.support.wait import wait_until

LOOPBACK = "0100007F"
"""127.0.0.1 as /proc/net/tcp has it."""
MAPPED_LOOPBACK = "0000000000000000FFFF00000100007F"
"""::ffff:127.0.0.1, as Java binds it."""
pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


COMMANDS = (
    ("control", "status"),
    ("workers",),
    ("topics", "ensure"),
    ("control", "show", "x"),
    ("routes", "ls"),
)


def test_commands_end_with_5(tmp_path: Path) -> None:
    with launcher(tmp_path, f"127.0.0.1:{closed_port()}", "p") as fleet, ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda command: fleet.run(*command, timeout=60), COMMANDS))
    for command, done in zip(COMMANDS, results, strict=True):
        assert done.returncode == 5, (command, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert "127.0.0.1" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_command_says_so_within_15_s(tmp_path: Path) -> None:
    with launcher(tmp_path, f"127.0.0.1:{closed_port()}", "p") as fleet:
        began = time.monotonic()
        assert fleet.run("version").returncode == 0
        started = time.monotonic()
        assert fleet.run("control", "pause", timeout=60).returncode == 5
        # On a quiet machine a command needs 2 s to start; on one that runs other tests as long as `version` just did.
        assert time.monotonic() - started < 13 + (started - began)


def test_services_wait_and_recover(tmp_path: Path) -> None:
    port, pages = closed_port(), (closed_port(), closed_port())
    with launcher(tmp_path, f"127.0.0.1:{port}", "p") as fleet:
        services = [
            fleet.worker("w1", "--http-port", str(pages[0])),
            fleet.store("s1", "--http-port", str(pages[1])),
        ]
        for service, page in zip(services, pages, strict=True):
            service.wait_log("service.waiting")
            assert httpx.get(f"http://127.0.0.1:{page}/healthz").status_code == 200
            red = httpx.get(f"http://127.0.0.1:{page}/readyz")
            assert red.status_code == 503
            assert "127.0.0.1" in red.text
        with LocalCluster.start(tmp_path / "kafka", die_with_parent=True, prefer_port=port) as cluster:
            assert cluster.bootstrap.endswith(str(port))
            assert fleet.run("topics", "ensure").returncode == 0
            for service, page in zip(services, pages, strict=True):
                service.wait_log("service.ready")
                wait_until(
                    lambda page=page: httpx.get(f"http://127.0.0.1:{page}/readyz").status_code == 200,  # type: ignore[misc]
                    30,
                    f"{page} ready",
                )
                assert listening(service.pid) == {LOOPBACK}, "listens outside 127.0.0.1"
            for node in cluster.nodes:
                assert node.pid is not None
                assert listening(node.pid) <= {LOOPBACK, MAPPED_LOOPBACK}, "Kafka listens outside 127.0.0.1"
            assert [service.terminate() for service in services] == [0, 0]
