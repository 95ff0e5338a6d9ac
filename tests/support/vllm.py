"""One stand-in and the engine that drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from moebus.engine.http import EngineServer
from moebus.engine.http.notes import Notes
from moebus.engine.vllm.engine import VllmEngine
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.stand_ins.vllm import VllmStandIn
from tests.support.stand_ins.vllm_core import Bugs
from tests.support.wait import wait_until

WEIGHT, CACHE = Tag.WEIGHT, Tag.KV_CACHE


@dataclass
class Rig:
    """`engine` drives `server`. `restarted()` is a new process of the worker beside the same server."""

    server: VllmStandIn
    root: Path
    engine: VllmEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.connect()

    def connect(self, home: str = "home", look_s: float = 10.0) -> VllmEngine:
        """Patient, as a test machine is slow; `look_s` where that is what is tested."""
        server = EngineServer(self.server.url)
        return VllmEngine(server, Notes(self.root / home, server.url), (str(self.root),), look_s=look_s)

    def restarted(self, *, notes: bool = True) -> VllmEngine:
        self.engine = self.connect() if notes else self.connect("another")
        return self.engine

    def checkpoint(self, content: str) -> str:
        folder = self.root / content
        folder.mkdir()
        (folder / "model.safetensors").write_text(content)
        return str(folder)

    def ask(self, tokens: int = 2, name: str = "") -> Any:
        headers = {"x-request-id": name} if name else {}
        answer = httpx.post(
            f"{self.server.url}/v1/completions", json={"max_tokens": tokens}, headers=headers, timeout=30.0
        )
        return answer.json()["choices"][0]

    def request(self, tokens: int, name: str = "") -> Background[Any]:
        """A request that is inside."""
        core = self.server.core
        before = len(core.running) + len(core.waiting)
        call = Background(lambda: self.ask(tokens, name))
        wait_until(lambda: len(core.running) + len(core.waiting) > before, 30.0, "a request inside")
        return call

    def update(self, version: str, source: str | None = None, cache: Any = "reset") -> None:
        self.engine.commit(self.engine.stage(version, source, None, Left()), cache, Left())

    def asleep(self, level: Any = "offload") -> None:
        self.engine.pause("abort", Left())
        for tag in ALL_TAGS:
            self.engine.sleep(tag, level, Left())

    @property
    def resident(self) -> tuple[bool, bool]:
        found = self.engine.inspect().resident
        return found[WEIGHT], found[CACHE]


New = Callable[..., Rig]


_IDLE: list[VllmStandIn] = []


def _server(bugs: Bugs) -> VllmStandIn:
    """One that an earlier test is done with: starting one takes longer than most tests."""
    if not _IDLE:
        return VllmStandIn(bugs)
    server = _IDLE.pop()
    server.reset(bugs)
    return server


@contextmanager
def rigs(root: Path) -> Iterator[New]:
    made: list[Rig] = []

    def new(**bugs: Any) -> Rig:
        made.append(Rig(_server(Bugs(**bugs)), root))
        return made[-1]

    try:
        yield new
        for rig in made:
            assert not rig.server.core.accidents
    finally:
        for rig in made:
            rig.engine.close()
            rig.server.faults.release()
            if rig.server.running.alive:
                _IDLE.append(rig.server)


@pytest.fixture
def new(tmp_path: Path) -> Iterator[New]:
    """Makes rigs; at the end no server must have served what it does not hold."""
    with rigs(tmp_path) as make:
        yield make
