"""The legacy paths by shared memory: holders in processes of their own, the gateway in another place of this host."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from moebus.engine.legacy_signals import KV_CACHE, PREFIX_TREE, SHM, WEIGHTS, LegacySignals, remove_signals
from moebus.producers.gateway import Backend, Legacy
from tests.support.gateway import page
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[3]
NAMES = (WEIGHTS, KV_CACHE, PREFIX_TREE)
ASK = (
    "import sys; from moebus.engine.legacy_signals import LegacySignals as L; a = getattr(L(sys.argv[1]), sys.argv[2])"
)


@dataclass
class Engine:
    """The three processes of an engine that has a cache process and a prefix tree."""

    folder: Path
    suffix: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        before = {name: self.lines(name).count("ready") for name in names}
        for name in names:
            passes_on = [KV_CACHE] if name == WEIGHTS else []
            words = [sys.executable, "-m", "tests.support.signal_holder", name, self.suffix, str(self.folder)]
            self.processes[name] = subprocess.Popen([*words, *passes_on], cwd=ROOT, stdin=subprocess.PIPE)
        wait_until(lambda: all(self.lines(n).count("ready") > before[n] for n in names), 60, f"{names} are held")

    def kill9(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait(30)
        assert process.stdin is not None
        process.stdin.close()

    def lines(self, name: str) -> list[str]:
        log = self.folder / name
        return log.read_text().splitlines() if log.exists() else []

    def effects(self, name: str) -> list[str]:
        return [line for line in self.lines(name) if line != "ready"]

    def hold(self, name: str) -> None:
        """Its next effect does not end before `release`."""
        (self.folder / f"hold-{name}").touch()

    def release(self, name: str) -> None:
        (self.folder / f"hold-{name}").unlink()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, uuid.uuid4().hex[:12])
    try:
        made.start(*NAMES)
        yield made
    finally:
        for name in list(made.processes):
            made.kill9(name)
        remove_signals(made.suffix)
        assert not list(SHM.glob(f"*.{made.suffix}"))


@pytest.fixture
def http(engine: Engine) -> Iterator[httpx.Client]:
    legacy = Legacy(suffixes=(engine.suffix,), timeout=60)
    with page(Backend(lambda: None), legacy=legacy) as client:
        yield client


def test_cycles_from_several_servers_at_once(engine: Engine, http: httpx.Client) -> None:
    """#4212, #5930: whoever asks, however often, every holder clears and loads in turn, and nobody crashes."""

    def ask(path: str) -> int:
        return http.get(path).status_code

    with ThreadPoolExecutor(6) as pool:
        for _ in range(10):
            cleared = list(pool.map(ask, ["/clear_load_weight"] * 6))
            assert 200 in cleared
            assert set(cleared) <= {200, 400}
            wait_until(lambda: http.get("/clear_load_weight").json()["msg"] == "model weight is cleared", 30, "cleared")
            updated = list(pool.map(ask, ["/update_model_weight"] * 6))
            assert 200 in updated
            assert set(updated) <= {200, 400}
            wait_until(lambda: LegacySignals(engine.suffix).serving(), 30, "loaded")
    for name in NAMES:
        assert engine.effects(name) == ["begin CLEARING", "end CLEARING", "begin UPDATING", "end UPDATING"] * 10
        assert engine.processes[name].poll() is None


@pytest.mark.parametrize(
    ("verb", "doing", "other_path"),
    [("clear", "clearing", "/update_model_weight"), ("update", "updating", "/clear_load_weight")],
)
def test_codes_while_another_server_asks(
    engine: Engine, http: httpx.Client, verb: str, doing: str, other_path: str
) -> None:
    path = {"clear": "/clear_load_weight", "update": "/update_model_weight"}[verb]
    if verb == "update":
        assert http.get(other_path).status_code == 200
    engine.hold(WEIGHTS)
    other = _other_server(engine.suffix, verb)
    wait_until(lambda: engine.effects(WEIGHTS)[-1:] == [f"begin {doing.upper()}"], 30, f"the weights are {doing}")
    same, opposite = http.get(path), http.get(other_path)
    assert (same.status_code, same.json()["msg"]) == (400, f"worker is {doing} model weight already")
    assert opposite.status_code == 403
    assert opposite.json()["msg"].startswith(f"worker is {doing} model weight, cannot ")
    engine.release(WEIGHTS)
    assert other.wait(60) == 0
    again = http.get(path)
    done = {"clear": "cleared", "update": "updated"}[verb]
    assert (again.status_code, again.json()["msg"]) == (200, f"model weight is {done}")
    assert again.json()["result"] == {engine.suffix: {"status": 200, "msg": again.json()["msg"]}}


def test_a_holder_that_is_killed_is_named_and_its_successor_recovers(engine: Engine, http: httpx.Client) -> None:
    engine.hold(PREFIX_TREE)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http.get, "/clear_load_weight")
        wait_until(lambda: engine.effects(PREFIX_TREE) == ["begin CLEARING"], 30, "the tree is being cleared")
        engine.kill9(PREFIX_TREE)
        answer = asked.result(30)
    assert answer.status_code == 404
    assert f"{PREFIX_TREE}.{engine.suffix} is -1 (clearing)" in answer.json()["error_message"]
    assert http.get("/update_model_weight").status_code == 404
    engine.release(PREFIX_TREE)
    engine.start(PREFIX_TREE)
    assert http.get("/update_model_weight").json()["msg"] == "model weight is updated"
    assert http.get("/clear_load_weight").json()["msg"] == "clear model weight successfully"
    assert http.get("/update_model_weight").json()["msg"] == "update model weight successfully"


def test_a_server_that_is_killed_leaves_nothing_stuck(engine: Engine, http: httpx.Client) -> None:
    engine.hold(PREFIX_TREE)
    other = _other_server(engine.suffix, "clear")
    wait_until(lambda: engine.effects(PREFIX_TREE) == ["begin CLEARING"], 30, "the tree is being cleared")
    other.kill()
    other.wait(30)
    engine.release(PREFIX_TREE)
    wait_until(lambda: engine.effects(PREFIX_TREE)[-1:] == ["end CLEARING"], 30, "the tree is cleared")
    assert not LegacySignals(engine.suffix).serving()
    assert http.get("/update_model_weight").json()["msg"] == "update model weight successfully"
    assert LegacySignals(engine.suffix).serving()
    assert engine.effects(WEIGHTS) == []


def test_a_failing_holder_is_told_at_once(engine: Engine, http: httpx.Client) -> None:
    (engine.folder / "fail").touch()
    answer = http.get("/clear_load_weight")
    assert (answer.status_code, answer.json()["msg"]) == (404, "clear prefix tree failed")
    (engine.folder / "fail").unlink()
    assert http.get("/clear_load_weight").status_code == 200


def _other_server(suffix: str, verb: str) -> subprocess.Popen[bytes]:
    """Another process that asks and ends with 0 where it was answered 200."""
    return subprocess.Popen([sys.executable, "-c", f"{ASK}(60); sys.exit(a.status != 200)", suffix, verb], cwd=ROOT)
