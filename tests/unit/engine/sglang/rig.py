"""An SGLangEngine before a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moebus.engine.http import EngineServer
from moebus.engine.http.notes import Notes
from moebus.engine.sglang.engine import KeepMode, SGLangEngine
from tests.support.stand_ins.running import Faults, Running
from tests.support.stand_ins.sglang import StandIn, application
from tests.support.stand_ins.shared import shared

LOOK_S = 10.0
"""A busy machine is no lost server."""


@dataclass
class Rig:
    """`rests`: how long the engine waited between looks, without waiting."""

    at: StandIn
    running: Running
    engine: SGLangEngine
    home: Path
    rests: list[float] = field(default_factory=list)

    @property
    def net(self) -> Faults:
        return self.running.faults

    def calls(self, path: str) -> list[Any]:
        return [body for name, body in self.at.calls if name == path]

    def again(self) -> SGLangEngine:
        """The engine of the worker's next process, after this one was killed."""
        server = EngineServer(self.running.url)
        return SGLangEngine(
            server, allowed_roots=[str(self.home)], notes=Notes(self.home, server.url), rest=_rest, look_s=LOOK_S
        )


def _rest(seconds: float) -> None:
    """Does not wait."""


@contextmanager
def sglang(home: Path, at: StandIn | None = None, keep: KeepMode = "in_place") -> Iterator[Rig]:
    at = at or StandIn()
    with shared(application(at)) as running:
        server = EngineServer(running.url)
        rests: list[float] = []
        notes = Notes(home, server.url)
        engine = SGLangEngine(
            server, allowed_roots=[str(home)], notes=notes, keep=keep, rest=rests.append, look_s=LOOK_S
        )
        try:
            yield Rig(at, running, engine, home, rests)
        finally:
            engine.close()
