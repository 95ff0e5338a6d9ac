"""What a vLLM server holds: read back where it tells, believed where it does not, never guessed open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from moebus.engine.http import Belief, EngineServer, Lives
from moebus.engine.http.notes import Notes
from moebus.engine.http.span import Span
from moebus.engine.port import EngineFailed, EngineRefused, EngineUnreachable, Inspection, Unsupported
from moebus.engine.vllm.api import READ_S, VllmApi
from moebus.engine.vllm.metrics import Gauges
from moebus.schemas.tags import ALL_TAGS, Tag

EMPTY, MIXED = "moebus:empty", "moebus:mixed"
"""Labels of weights that are no version: the server keeps them while its worker restarts."""
LOOKS_S = 0.9
"""What all the looks of one inspection may take."""


@dataclass(frozen=True, slots=True)
class Now:
    """What is known right before a call."""

    belief: Belief
    found: Inspection
    gauges: Gauges

    @property
    def life(self) -> str:
        return self.belief.life

    def need_pause(self, doing: str) -> None:
        """Raises EngineFailed."""
        if not self.found.paused:
            raise EngineFailed(f"{doing}: the engine serves requests; pause it first")


class VllmState:
    """Thread-safe. A belief is of one life of the server; `notes` carry it over a restart of the worker."""

    def __init__(self, server: EngineServer, api: VllmApi, notes: Notes, look_s: float) -> None:
        self._api = api
        self._look_s = look_s
        self._notes = notes
        self._lock = threading.Lock()
        self._belief = Belief(life="none")
        self.gauges = Gauges()
        self.labelled = True
        """Whether the server names its weights; learned at the first look."""
        self._lives = Lives(server, self._boot)
        self._busy = 0
        self._last: Inspection | None = None

    def _boot(self, within: float | None = None) -> str | None:
        self.gauges = self._api.gauges(self._look_s if within is None else within)
        return self.gauges.started

    def identity(self) -> str:
        return self._lives.current()

    # -- beliefs

    def _belief_now(self, budget: Span) -> Belief:
        """What is known of this life."""
        try:
            fact = self._boot(budget.remaining())
        except (Unsupported, EngineFailed, EngineRefused):
            fact, self.gauges = None, Gauges()
        life = self._lives.judged(fact)
        with self._lock:
            if self._belief.life == life:
                return self._belief
        fresh = self._first_look(life, budget)
        with self._lock:
            if self._belief.life != life:
                self._belief = fresh
            return self._belief

    def _first_look(self, life: str, budget: Span) -> Belief:
        """A server met for the first time. Paused, it may hold anything unless it says that it sleeps."""
        version = self._api.version(budget.remaining())
        self.labelled = version is not None
        noted = self._notes.read()
        if noted is not None and noted.life == life:
            doubt = not noted.sure or _contradicted(noted, self.gauges)
            return replace(noted, unsure=frozenset(ALL_TAGS)) if doubt else noted
        fresh = Belief(life=life, version=version)
        if version in (EMPTY, MIXED):
            fresh = replace(fresh, weights="empty" if version == EMPTY else "mixed", version=None, source=None)
        if not self._api.is_sleeping(budget.remaining()):
            return fresh
        fresh, gauges = replace(fresh, source=None), self.gauges
        if version is None:  # nobody says whether somebody emptied them
            fresh = replace(fresh, weights="empty")
        if gauges.asleep is not None:
            return fresh.slept(gauges.asleep)
        return replace(fresh, unsure=frozenset(ALL_TAGS), frozen=gauges.requests or 0)

    def change(self, life: str, how: Callable[[Belief], Belief]) -> None:
        """Replaces the belief of `life`; a server that has restarted since keeps its own."""
        with self._lock:
            if self._belief.life == life:
                self._belief = how(self._belief)
                self._notes.write(replace(self._belief, sure=not self._belief.unsure))

    # -- looking

    @property
    def busy(self) -> bool:
        """A call of this worker runs. The server's core takes calls one by one, so looks may have to wait for it."""
        return self._busy > 0

    @contextmanager
    def calling(self) -> Iterator[Now]:
        """Around a call of this worker: the server as it is before, which is also what is said of it meanwhile.

        Raises EngineUnreachable: nothing was done.
        """
        found = self._last = self.look(Span(READ_S))
        now = Now(self._belief, found, self.gauges)
        self._busy += 1
        try:
            yield now
        finally:
            self._busy -= 1

    @property
    def known(self) -> Belief:
        """The belief as it stands, without a look."""
        return self._belief

    def inspect(self) -> Inspection:
        """While a call of this worker keeps the server from answering: as it was before. Raises EngineUnreachable."""
        try:
            self._last = self.look(Span(self._look_s))
        except EngineUnreachable:
            if not self.busy or self._last is None:
                raise
        return self._last

    def look(self, budget: Span) -> Inspection:
        """As the server is now. Raises EngineUnreachable: not all is answered within `budget`."""
        belief = self._belief_now(budget)
        paused = self._api.is_paused(budget.remaining())
        if not paused and (belief.asleep or belief.unsure) and not self._api.is_sleeping(budget.remaining()):
            self.change(belief.life, _woken)  # by someone else
            belief = _woken(belief)
        label = self._api.version(budget.remaining()) if self.labelled else None
        weights = belief.weights
        if self.labelled:
            weights = "empty" if label == EMPTY else "mixed" if label == MIXED else "valid"
        version = label if self.labelled else belief.version
        # What is not sure is shown as what it was not meant to be, so that whoever wants it otherwise makes it so.
        resident = {tag: belief.resident[tag] != (tag in belief.unsure) for tag in ALL_TAGS}
        valid = weights == "valid" and resident[Tag.WEIGHT] and Tag.WEIGHT not in belief.unsure
        requests = self.gauges.requests or 0
        return Inspection(
            paused=paused,
            in_flight=belief.frozen if paused else requests,
            frozen=belief.frozen if paused else 0,
            resident=resident,
            weights_valid=valid,
            version=version if valid else None,
            weights_digest=None,
            bytes_by_tag={},
            tainted=weights == "mixed" and not belief.open_update,
        )


def _contradicted(noted: Belief, gauges: Gauges) -> bool:
    """Whether the server says otherwise than the notes: another worker, with notes of its own, has been here since."""
    asleep = len(noted.asleep)
    return (gauges.asleep is not None and not asleep) or (gauges.awake is True and asleep == len(ALL_TAGS))


def _woken(belief: Belief) -> Belief:
    for tag in belief.asleep:
        belief = belief.with_tag(tag, True)
    return replace(belief, frozen=0, unsure=frozenset())
