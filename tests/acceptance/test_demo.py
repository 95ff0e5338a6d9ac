"""`moebus demo` as a user runs it: the whole story, two on one broker, Ctrl-C, kill -9, --keep and --down."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moebus.broker.local import LocalCluster
from tests.support.wait import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.paddle, pytest.mark.slow, pytest.mark.timeout(240)]


def start(directory: Path, *options: str, demo: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """`moebus OPTIONS demo --dir DIRECTORY DEMO`, in a process group of its own as a terminal would."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOEBUS_")}
    return subprocess.Popen(
        [sys.executable, "-m", "moebus.cli", *options, "demo", "--dir", str(directory), *demo],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=environment,
    )  # fmt: skip


def users_of(directory: Path) -> list[str]:
    """Command lines of the processes that name the demo's folder, the demo itself included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(directory) in line:
                found.append(line)
    return found


def senders(workers: set[int]) -> set[int]:
    """Those of these workers, by process id, that have a process which sends their routes, or had when they ended."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        if len(words) > 5 and b"moebus RoutingPublisher" in words[2]:
            found.add(int(words[-3]))
    return found & workers


def workers_of(directory: Path) -> set[int]:
    """Process ids."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes()
        except OSError:
            continue
        if b"\0worker\0" in line and str(directory).encode() in line:
            found.add(int(entry.parent.name))
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The demo's folder; whatever a failed test leaves running there is taken down."""
    made = tmp_path / "demo"
    yield made
    start(made, demo=("--down",)).communicate(timeout=60)


def figures(text: str) -> dict[str, int]:
    """What the trainer's account says."""
    found = re.search(r"(\d+) rollouts \((\d+) under step-0, (\d+) under step-1\)", text)
    assert found, text
    differ = re.search(r"differ from a recompute without cache: (\d+)", text)
    cached = re.search(r"served by the prefix cache: ([\d,]+)", text)
    assert differ, text
    assert cached, text
    return {
        "rollouts": int(found[1]), "first": int(found[2]), "second": int(found[3]),
        "differ": int(differ[1]), "cached": int(cached[1].replace(",", "")),
    }  # fmt: skip


def check_story(text: str) -> None:
    told = figures(text)
    assert told["rollouts"] == 32
    assert min(told["first"], told["second"]) > 0
    assert told["differ"] == 0
    assert told["cached"] > 0
    assert "a:1 holds 0 rollouts, a:10 still 2" in text
    assert "the store holds 0 rollouts of this run" in text
    assert re.search(r"rollouts published and acknowledged\W+32", text)
    assert re.search(r"dead letters\W+0", text)
    assert re.search(r"times lower", text)


def test_two_side_by_side_on_one_broker(kafka_broker: LocalCluster, tmp_path: Path, topic_prefix: str) -> None:
    demos = [
        start(tmp_path / name, "--bootstrap-servers", kafka_broker.bootstrap, "--topic-prefix", f"{topic_prefix}{name}")
        for name in ("one", "two")
    ]
    for demo in demos:
        text, errors = demo.communicate(timeout=200)
        assert demo.returncode == 0, errors[-3000:]
        check_story(text)
    for name in ("one", "two"):
        assert users_of(tmp_path / name) == []


def logs(directory: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in directory.glob("worker*.log"))


@pytest.mark.parametrize(
    ("number", "sign"),
    [
        (signal.SIGINT, "service.started"),
        (signal.SIGINT, '"method": "pause"'),
        (signal.SIGTERM, "control.reconciled"),
        (signal.SIGKILL, "control.reconciled"),
    ],
    ids=["ctrl-c at start", "ctrl-c in the round", "term", "kill-9"],
)
def test_however_it_ends_nothing_is_left(number: signal.Signals, sign: str, directory: Path) -> None:
    demo = start(directory)
    wait_until(lambda: sign in logs(directory), 90, f"{sign} in a worker's log")
    assert len(users_of(directory)) >= 4, "its Kafka and its processes run"
    workers = workers_of(directory)
    if sign != "service.started":
        assert senders(workers), "a process of its own sends"
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=60)
    wait_until(lambda: users_of(directory) == [] and not senders(workers), 60, "every process to be gone")
    if number is not signal.SIGKILL:
        assert demo.returncode == 130, errors[-3000:]
        assert "Traceback" not in errors


def test_keep_and_down(directory: Path) -> None:
    kept = start(directory, demo=("--keep",))
    text, errors = kept.communicate(timeout=200)
    assert kept.returncode == 0, errors[-3000:]
    check_story(text)
    assert "moebus demo --down" in text
    urls = json.loads((directory / "demo.json").read_text())["urls"]
    assert len(urls) == 3
    for url in urls.values():
        assert httpx.get(f"{url}/readyz").status_code == 200
    down = start(directory, demo=("--down",))
    said, _ = down.communicate(timeout=60)
    assert down.returncode == 0
    assert "kafka" in said
    wait_until(lambda: users_of(directory) == [], 30, "every process to be gone")
