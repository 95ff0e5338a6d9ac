"""What has to be done to an engine so that it is in the desired state. `plan` is pure; `reconcile` carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moebus.consumers.control.effects import Effects, behind, tainted
from moebus.consumers.control.lifecycle import ASLEEP, Commit, State, Wake, after_step
from moebus.consumers.control.log_index import Update
from moebus.engine.port import Capabilities, Deadline, EngineTainted, Inspection, Level
from moebus.schemas.errors import MoebusError
from moebus.schemas.responses import Lifecycle, Weights
from moebus.schemas.tags import ALL_TAGS, Tag


@dataclass(frozen=True, slots=True)
class Plan:
    """`close`: admission must be closed before anything else. `load`: memory is not of the desired version.
    `empty`: the weights must hold nothing. `sleep`, `wake`: tags, once the weights are right."""

    close: bool
    load: bool
    empty: bool
    sleep: tuple[Tag, ...]
    wake: tuple[Tag, ...]


def plan(state: State, found: Inspection, *, same_engine: bool, digest: str | None) -> Plan:
    """`same_engine`: memory was not lost since the state was recorded. `digest`: of the desired weights, if known."""
    empty = state.weights is Weights.EMPTY and not state.transferring and state.weight is not ASLEEP
    load = not empty and not state.transferring and not _right_version(state, found, same_engine, digest)
    sleep = tuple(tag for tag in ALL_TAGS if state.tag(tag) is ASLEEP and found.resident.get(tag, True))
    wake = tuple(tag for tag in ALL_TAGS if state.tag(tag) is not ASLEEP and not found.resident.get(tag, True))
    must_empty = empty and found.weights_valid
    close = not found.paused and (load or must_empty or bool(sleep) or bool(wake) or not state.running)
    return Plan(close, load, must_empty, sleep, wake)


def _right_version(state: State, found: Inspection, same_engine: bool, digest: str | None) -> bool:
    if found.tainted or found.apart:
        return False
    if not found.resident.get(Tag.WEIGHT, True):
        return state.fault is None and (same_engine or state.version is None)
    if state.fault is Lifecycle.TAINTED and same_engine:
        return False  # the engine may be unable to tell
    if state.version is None or (state.version_offset is None and state.fault is None and not same_engine):
        return found.weights_valid  # the engine's own weights, whatever they call themselves
    same_digest = digest is None or found.weights_digest is None or found.weights_digest == digest
    return found.weights_valid and found.version == state.version and same_digest


class Cannot(Exception):
    """The desired state cannot be reached; the text says why."""


class Reconciler:
    """Drives one engine to a desired state. Runs on the worker's thread."""

    def __init__(
        self,
        effects: Effects,
        can: Capabilities,
        updates: Callable[[int], Update | None],
        deadline: Callable[[], Deadline],
    ) -> None:
        self._effects = effects
        self._can = can
        self._updates = updates
        self._deadline = deadline

    def reconcile(self, state: State, *, same_engine: bool, digest: str | None, open_traffic: bool) -> State:
        """The state reached: `state` itself, or BEHIND / TAINTED with the reason. Opens admission only where the
        state is RUNNING, nothing is wrong and `open_traffic`."""
        engine = self._effects.engine
        found = engine.inspect()
        todo = plan(state, found, same_engine=same_engine, digest=digest)
        try:
            if todo.close:
                engine.pause("abort", self._deadline())
            state = self._weights(state, todo, found, same_engine)
            self._tags(state, todo)
        except EngineTainted as error:
            return tainted(state, str(error))
        except (Cannot, MoebusError) as error:
            return self._failed(state, str(error), same_engine)
        return self._settle(state, open_traffic, digest)

    def _settle(self, state: State, open_traffic: bool, digest: str | None) -> State:
        engine = self._effects.engine
        found = engine.inspect()
        holds = state.weights is Weights.VALID and not state.transferring and state.fault is None
        if holds and found.resident.get(Tag.WEIGHT, True) and not _right_version(state, found, True, digest):
            return self._failed(state, f"the engine woke with version {found.version!r}, not {state.version!r}", True)
        if state.version is None and found.weights_valid:
            state = replace(state, version=found.version)
        state = replace(state, frozen=found.frozen > 0)
        if state.running and found.paused and open_traffic:
            engine.resume()
        return state

    def _failed(self, state: State, reason: str, same_engine: bool) -> State:
        found = self._effects.engine.inspect()
        if found.tainted or (state.fault is Lifecycle.TAINTED and same_engine):
            return tainted(state, state.reason or reason)
        return behind(state, reason, found)

    def _weights(self, state: State, todo: Plan, found: Inspection, same_engine: bool) -> State:
        if state.transferring and not same_engine:
            raise Cannot("the engine was lost while a weight transfer was open; transfer or update again")
        if todo.load:
            return self._load(state, found)
        if todo.empty:
            self._effects.engine.sleep(Tag.WEIGHT, "discard", self._deadline())
            self._effects.engine.wakeup(Tag.WEIGHT, "empty", self._deadline())
        return replace(state, fault=None, reason=None, holds=None) if _cured(state, todo) else state

    def _load(self, state: State, found: Inspection) -> State:
        """Stages and commits the desired version from its source."""
        update = None if state.version_offset is None else self._updates(state.version_offset)
        if update is None or update.args is None:
            raise Cannot(f"version {state.version!r} has no source to load it from; update the weights")
        if not found.resident.get(Tag.WEIGHT, True):
            self._effects.engine.wakeup(Tag.WEIGHT, "empty", self._deadline())
        pending, missed, phase = state.pending, state.missed, state.phase
        self._effects.load(Commit(update.offset, update.args))
        loaded = after_step(replace(state, weights=Weights.VALID), Commit(update.offset, update.args))
        return replace(loaded, phase=phase, pending=pending, missed=missed, version_offset=state.version_offset)

    def _tags(self, state: State, todo: Plan) -> None:
        """Sleeps first: an engine that sleeps whole takes down what has to be woken again."""
        engine = self._effects.engine
        resident = engine.inspect().resident
        for tag in ALL_TAGS:
            if state.tag(tag) is ASLEEP and resident.get(tag, True):
                engine.sleep(tag, self._level(tag), self._deadline())
        resident = engine.inspect().resident
        for tag in ALL_TAGS:
            if state.tag(tag) is not ASLEEP and not resident.get(tag, True):
                step = Wake(tag, "empty" if state.weights is Weights.EMPTY else "restore")
                engine.wakeup(step.tag, step.weights, self._deadline())

    def _level(self, tag: Tag) -> Level:
        return "offload" if "offload" in self._can.levels.get(tag, frozenset()) else "discard"


def _cured(state: State, todo: Plan) -> bool:
    """Empty memory is what was asked for only where a command emptied it; after a fault it stays one."""
    return state.fault is not None and not todo.load and state.weights is Weights.VALID
