"""A FastDeployEngine before a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from moebus.engine.fastdeploy.engine import FastDeployEngine
from moebus.engine.http import EngineServer
from moebus.engine.http.notes import Notes
from tests.support.stand_ins.fastdeploy import StandIn, application
from tests.support.stand_ins.running import Faults, Running
from tests.support.stand_ins.shared import shared

LOOK_S = 10.0
"""A busy machine is no lost server."""


@dataclass
class Rig:
    at: StandIn
    running: Running
    engine: FastDeployEngine
    home: Path
    others: list[FastDeployEngine] = field(default_factory=list)

    @property
    def net(self) -> Faults:
        return self.running.faults

    def calls(self, method: str) -> list[Any]:
        return [given for name, given in self.at.calls if name == method]

    def again(self) -> FastDeployEngine:
        """The engine of the worker's next process, after this one was killed."""
        server = EngineServer(self.running.url)
        self.others.append(FastDeployEngine(server, notes=Notes(self.home, server.url), look_s=LOOK_S))
        return self.others[-1]

    def ask(self, name: str) -> int:
        """A chat request; its number."""
        body = {"user": name, "messages": []}
        return httpx.post(f"{self.running.url}/v1/chat/completions", json=body, timeout=30).status_code


@contextmanager
def fastdeploy(home: Path, at: StandIn | None = None) -> Iterator[Rig]:
    at = at or StandIn()
    with shared(application(at)) as running:
        server = EngineServer(running.url)
        engine = FastDeployEngine(server, notes=Notes(home, server.url), look_s=LOOK_S)
        rig = Rig(at, running, engine, home)
        try:
            yield rig
        finally:
            at.go.set()
            for made in (engine, *rig.others):
                made.close()
