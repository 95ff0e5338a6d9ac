"""Desired state: the commands of the log replayed through `decide`, deadlines ignored (design section 3.1). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from moebus.consumers.control.identity import Standing
from moebus.consumers.control.lifecycle import Commit, Discard, Refuse, Run, State, after_step, decide
from moebus.consumers.control.log_index import Entry, Kind, LogIndex
from moebus.engine.port import Capabilities
from moebus.schemas.control_args import STATE_CHANGING, BeginRunArgs, Method
from moebus.schemas.responses import Code


@dataclass(slots=True)
class Member:
    """What of a worker decides which commands are for it. `refused`: offsets of state-changing commands that `expect`
    or `run` turned away; they count as no change. `left`: runs that this worker was in before the current one."""

    worker_id: str
    labels: Mapping[str, str]
    can: Capabilities
    refused: set[int] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def meant_by(self, entry: Entry) -> bool:
        """Whether the target of the entry matches."""
        return entry.where.matches(self.worker_id, self.labels)

    def entered(self, before: str | None, now: str | None) -> None:
        """The worker went from one run to another."""
        if before is not None and before != now:
            self.left.add(before)


def admit(index: LogIndex, member: Member, state: State, entry: Entry) -> Refuse | None:
    """Why `expect` or `run` turn a command away from this worker; remembered in `member.refused`."""
    refused = _turned_away(index, member, state, entry)
    if refused is not None and entry.request is not None and entry.request.method in STATE_CHANGING:
        member.refused.add(entry.offset)
    return refused


def _turned_away(index: LogIndex, member: Member, state: State, entry: Entry) -> Refuse | None:
    request = entry.request
    assert request is not None
    if request.run is not None and request.run != state.run:
        return Refuse(Code.CONFLICT, f"run {request.run!r} is not the current one ({state.run!r})")
    begun = request.command.run if isinstance(request.command, BeginRunArgs) else None
    if begun in member.left and begun != state.run:
        return Refuse(Code.CONFLICT, f"run {begun!r} was begun before and ended; the current one is {state.run!r}")
    if request.expect is None:
        return None
    if request.expect.after is not None:
        for offset, request_id, where in index.changed_between(request.expect.after, entry.offset):
            if offset not in member.refused and where.matches(member.worker_id, member.labels):
                text = f"expect.after={request.expect.after}: request {request_id!r} at offset {offset} came first"
                return Refuse(Code.CONFLICT, text)
    known = state.view().version
    if request.expect.version is not None and known is not None and request.expect.version != known:
        setter = index.updates.get(state.version_offset) if state.version_offset is not None else None
        by = "" if setter is None else f" by request {setter.request_id!r} at offset {setter.offset}"
        return Refuse(Code.CONFLICT, f"expect.version={request.expect.version!r}: the weights are {known!r}{by}")
    return None


def counts(entry: Entry) -> bool:
    """Whether the entry is a command or a decision that may change a state: neither duplicate nor conflict."""
    return entry.standing is Standing.FIRST and entry.kind in (Kind.COMMAND, Kind.DECIDE)


def fold_entry(index: LogIndex, member: Member, state: State, entry: Entry) -> State:
    """The desired state after one more entry, whatever became of it here."""
    if not counts(entry):
        return state
    if entry.kind is Kind.DECIDE:
        return _fold_decision(index, member, state, entry)
    if not member.meant_by(entry) or _void(index, entry):
        return state
    if admit(index, member, state, entry) is not None:
        return state
    decision = decide(state, entry.command, member.can, None)
    if not isinstance(decision, Run):
        return state
    member.entered(state.run, decision.after.run)
    return replace(decision.after, frozen=False)  # no requests: a fold knows of none


def _fold_decision(index: LogIndex, member: Member, state: State, entry: Entry) -> State:
    update = index.updates.get(entry.update) if entry.update is not None else None
    if update is None or update.args is None or not update.where.matches(member.worker_id, member.labels):
        return state
    if update.offset not in (state.pending, state.missed):
        return state
    if entry.verdict == "commit":
        return after_step(state, Commit(update.offset, update.args))
    return after_step(state, Discard()) if state.pending is not None else replace(state, missed=None)


def _void(index: LogIndex, entry: Entry) -> bool:
    """An update is undone by its own decision; any other voided command was never obeyed by a joiner."""
    return not index.decidable(entry.offset) and index.voided(entry.request_id)


def fold(index: LogIndex, member: Member, entries: Iterable[Entry], state: State) -> State:
    """The desired state of a new worker; `index` has seen at least these entries.

    A `begin_run` starts afresh: version and weights are again those in memory.
    """
    for entry in entries:
        before = state
        state = fold_entry(index, member, state, entry)
        begins = entry.kind is Kind.COMMAND and entry.request is not None and entry.request.method is Method.BEGIN_RUN
        if begins and state is not before:
            state = State(phase=state.phase, run=state.run)
    return state
