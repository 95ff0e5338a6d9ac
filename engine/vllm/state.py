"""What a vLLM server holds: read back where it tells, believed where it does not, never guessed open."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from moebus.engine.http import Belief, EngineServer, Lives
from moebus.engine.http.server import LOOK_S
from moebus.engine.http.span import Span
from moebus.engine.port import Inspection
from moebus.engine.vllm.api import VllmApi
from moebus.engine.vllm.metrics import Gauges
from moebus.schemas.tags import ALL_TAGS, Tag

EMPTY, MIXED = "moebus:empty", "moebus:mixed"
"""Labels of weights that are no version: the server keeps them while its worker restarts."""


class VllmState:
    """Thread-safe. A belief is of one life of the server."""

    def __init__(self, server: EngineServer, api: VllmApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._belief = Belief(life="none")
        self._gauges = Gauges()
        self.labelled = True
        """Whether the server names its weights; learned at the first look."""
        self._lives = Lives(server, self._boot)

    def _boot(self) -> str | None:
        self._gauges = self._api.gauges()
        return self._gauges.started

    def identity(self) -> str:
        return self._lives.current()

    # -- beliefs

    def belief(self) -> Belief:
        """What is known of this life. Raises EngineUnreachable."""
        life = self.identity()
        with self._lock:
            if self._belief.life == life:
                return self._belief
        fresh = self._first_look(life)
        with self._lock:
            if self._belief.life != life:
                self._belief = fresh
            return self._belief

    def _first_look(self, life: str) -> Belief:
        """A server met for the first time. Paused, it may hold anything unless it says that it sleeps."""
        version = self._api.version()
        self.labelled = version is not None
        fresh = Belief(life=life, version=version)
        if version in (EMPTY, MIXED):
            fresh = replace(fresh, weights="empty" if version == EMPTY else "mixed", version=None, source=None)
        if not self._api.is_sleeping():
            return fresh
        fresh, gauges = replace(fresh, source=None), self._gauges
        if gauges.asleep is not None:
            return fresh.slept(gauges.asleep)
        return replace(fresh, unsure=frozenset(ALL_TAGS), frozen=gauges.requests or 0)

    def change(self, life: str, how: Callable[[Belief], Belief]) -> None:
        """Replaces the belief of `life`; a server that has restarted since keeps its own."""
        with self._lock:
            if self._belief.life == life:
                self._belief = how(self._belief)

    # -- looking

    def inspect(self, within: float = 0.9) -> Inspection:
        """Raises EngineUnreachable: no answer, or not all of them within `within` seconds."""
        budget = Span(within)
        belief = self.belief()
        paused = self._api.is_paused(_some(budget))
        if not paused and (belief.asleep or belief.unsure) and not self._api.is_sleeping(_some(budget)):
            self.change(belief.life, _woken)  # by someone else
            belief = _woken(belief)
        label = self._api.version(_some(budget)) if self.labelled else None
        weights = belief.weights
        if self.labelled:
            weights = "empty" if label == EMPTY else "mixed" if label == MIXED else "valid"
        version = label if self.labelled else belief.version
        valid = weights == "valid" and belief.resident[Tag.WEIGHT]
        requests = self._gauges.requests or 0
        return Inspection(
            paused=paused,
            in_flight=belief.frozen if paused else requests,
            frozen=belief.frozen if paused else 0,
            resident={tag: belief.resident[tag] for tag in ALL_TAGS},
            weights_valid=valid,
            version=version if valid else None,
            weights_digest=None,
            bytes_by_tag={},
            tainted=weights == "mixed" and not belief.open_update,
        )

    def gauges(self) -> Gauges:
        return self._api.gauges()


def _some(budget: Span) -> float:
    return min(LOOK_S, budget.remaining())


def _woken(belief: Belief) -> Belief:
    for tag in belief.asleep:
        belief = belief.with_tag(tag, True)
    return replace(belief, frozen=0, unsure=frozenset())
