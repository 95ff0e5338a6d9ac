"""One worker: what it does with each entry of the log that is meant for it (design sections 3.1 and 3.4)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from moebus.broker.errors import BrokerUnavailable
from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.consumers.control.answers import Answers, Ticket
from moebus.consumers.control.broker_time import BrokerClock, Until
from moebus.consumers.control.effects import Outcome, Result, already_there
from moebus.consumers.control.fold import Member, admit
from moebus.consumers.control.identity import Standing
from moebus.consumers.control.journal import Journal, Stopped
from moebus.consumers.control.keeper import RECONCILE_S, Keeper
from moebus.consumers.control.lifecycle import (
    Already,
    Commit,
    Discard,
    Pause,
    Refuse,
    Run,
    Stage,
    State,
    Step,
    after_step,
    decide,
)
from moebus.consumers.control.log_index import Entry, Kind, LogIndex, Update
from moebus.consumers.control.recall import recall
from moebus.consumers.control.reporter import Reporter, WorkerSpec
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.schemas.control_args import Method
from moebus.schemas.members import DoneOperation, Operation
from moebus.schemas.responses import Code, ControlResponse, Lifecycle, Phase

GRACE_MS = 60_000
Fault = Callable[[str], None]
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all workers of a process have in common."""

    broker: Broker
    topics: Topics
    journal: Journal
    index: LogIndex
    clock: BrokerClock
    metrics: Metrics
    fault: Fault


class Worker:
    """Everything that touches the engine runs on the thread that calls `run_pending`."""

    def __init__(self, spec: WorkerSpec, boot_id: str, shared: Shared) -> None:
        self.spec = spec
        self.shared = shared
        can = spec.engine.capabilities()
        self.member = Member(spec.worker_id, spec.labels, can)
        self.reporter = Reporter(spec, boot_id, shared.journal)
        self.answers = Answers(self.reporter, shared.journal, shared.clock, shared.metrics)
        self.log = _log.bind(worker_id=spec.worker_id, boot_id=boot_id)
        self.keeper = Keeper(self.reporter, can, shared.index, shared.clock)
        self.taken_over = threading.Event()

    # -- state

    @property
    def state(self) -> State:
        return self.reporter.state

    @state.setter
    def state(self, state: State) -> None:
        self.reporter.state = state

    def bind_log(self, ticket: Ticket) -> None:
        """Binds the ids of an operation to every line that follows."""
        place = f"{self.shared.topics.control_requests}/0/{ticket.offset}"
        self.log = _log.bind(
            worker_id=self.spec.worker_id, boot_id=self.reporter.boot_id, request_id=ticket.request_id,
            method=ticket.method, position=place,
        )  # fmt: skip

    # -- entries

    def handle(self, entry: Entry, *, catching_up: bool = False) -> None:
        """Deals with one entry; afterwards `applied` is behind it. Raises Stopped."""
        self.shared.fault("after_read")
        ticket = Ticket.of(entry, self.shared.clock.now_ms())
        self.bind_log(ticket)
        try:
            self._dispatch(entry, ticket, catching_up)
        except Stopped:
            raise
        except Exception as error:  # the next record must be served
            self.log.error("control.internal_error", str(error), exc=error)
            self.reporter.operation = self.reporter.busy_until = self.reporter.shown = None
            self._answer(entry, ticket, Code.FAILED, f"internal error: {type(error).__name__}: {error}")

    def _dispatch(self, entry: Entry, ticket: Ticket, catching_up: bool) -> None:
        if entry.kind is Kind.INVALID:
            self._answer(entry, ticket, Code.INVALID, str(entry.error))
        elif entry.standing is Standing.CONFLICT:
            bound = self.shared.index.identities.get(entry.request_id)
            first = "" if bound is None else f" at offset {bound.offset}"
            self._answer(entry, ticket, Code.CONFLICT, f"this id belongs to another request{first}; use a new id")
        elif entry.standing is Standing.REPEAT:
            self._repeat(entry)
        elif entry.kind is Kind.DECIDE:
            self.decision(entry, catching_up)
        elif entry.request is not None and entry.request.method is Method.STATUS:
            self.status(entry)
        elif entry.kind is Kind.COMMAND:
            self._command(entry, ticket, catching_up)

    def _command(self, entry: Entry, ticket: Ticket, catching_up: bool) -> None:
        index, now = self.shared.index, self.shared.clock.now_ms()
        if not index.decidable(entry.offset) and index.voided(entry.request_id):
            self._answer(entry, ticket, Code.FAILED, "voided by its issuer before it began")
            return
        if self.state.frozen:  # they may have been aborted since
            self.state = self.keeper.effects.observe(self.state)
        refused = admit(index, self.member, self.state, entry)
        if refused is None and self.keeper.dirty and entry.expires_ms is not None and now < entry.expires_ms:
            self.keeper.reconcile(open_traffic=False)
        decision = refused or decide(self.state, entry.command, self.member.can, now)
        if isinstance(decision, Run):
            self.execute(ticket, entry.offset, decision, entry.expires_ms)
        elif isinstance(decision, Already):
            self.state = decision.after or self.state
            tags = already_there(decision.tags, entry.command.method)
            self._answer(entry, ticket, Code.ALREADY, decision.message, {"tags": tags} if tags else None)
        else:
            if decision.code is Code.EXPIRED:
                self._expired(entry, catching_up)
            self._answer(entry, ticket, decision.code, f"{decision.message}{self._in_the_way(refused, decision)}")

    def _in_the_way(self, refused: Refuse | None, decision: Refuse) -> str:
        """The id of the update that is staged, for who is refused because of it."""
        offset = self.state.pending
        update = self.shared.index.updates.get(offset) if offset is not None else None
        if update is None or refused is not None or decision.code is not Code.CONFLICT:
            return ""
        return f": request {update.request_id!r}"

    def _expired(self, entry: Entry, catching_up: bool) -> None:
        """No effect now; what was missed while away still counts for the desired state, an update by its commit."""
        folded = decide(self.state, entry.command, self.member.can, None)
        if not isinstance(folded, Run):
            return
        if entry.command.method is Method.UPDATE_WEIGHTS:
            self.state = replace(self.state, missed=entry.offset)
        elif catching_up:
            self.member.entered(self.state.run, folded.after.run)
            self.state = replace(folded.after, frozen=self.state.frozen)
            self.keeper.dirty = True

    def execute(
        self, ticket: Ticket, offset: int, run: Run, expires_ms: int | None, method: str | None = None
    ) -> Outcome:
        """The writing order of design 3.1: state, effect, answer, state. `offset`: of the entry that asks."""
        self._begin(ticket, offset, expires_ms, method or ticket.method)
        self.shared.fault("after_state")
        before = self.state

        def between() -> None:
            self.shared.fault("mid_effect")

        deadline = Until(self.shared.clock, expires_ms)
        out = self.keeper.effects.run(run, before, deadline, lambda step: self._step(ticket, step), between)
        self.shared.fault("after_effect")
        self.reporter.shown = None
        self.state = out.state
        self.member.entered(before.run, out.state.run)
        staged = out.code is Code.OK and any(isinstance(step, Stage) for step in run.steps)
        voided = any(isinstance(step, Discard) for step in run.steps)
        code, message = (Code.FAILED, "voided") if voided else (out.code, out.message)
        phase = Phase.STAGED if staged else Phase.DONE
        self.answers.give(ticket, code, message, out.result, self.log, phase=phase)
        self.shared.fault("after_response")
        self.finish(ticket, offset, code, method)
        if code is Code.UNKNOWN:  # it has been answered; the engine is brought to where it was before
            self.state = replace(self.state, weight=before.weight, kv_cache=before.kv_cache)
            self.keeper.reconcile(open_traffic=True)
            self.reporter.record()
        self.close_again()
        return out

    def _begin(self, ticket: Ticket, offset: int, expires_ms: int | None, method: str) -> None:
        now = self.shared.clock.now_ms()
        ticket.started_ms = now
        self.reporter.operation = Operation(
            offset=offset, method=method, request_id=ticket.request_id[:64], started_ms=now
        )
        self.reporter.busy_until = expires_ms if expires_ms is not None else now + int(RECONCILE_S * 1000)
        self.reporter.record()
        self.answers.tell(ticket, Phase.ACCEPTED)

    def _step(self, ticket: Ticket, step: Step) -> None:
        name = type(step).__name__.lower()
        tag = f" {step.tag}" if hasattr(step, "tag") else ""
        if isinstance(step, Pause):
            self.reporter.shown = Lifecycle.DRAINING
        elif isinstance(step, Commit):
            self.reporter.shown = Lifecycle.UPDATING
        else:
            self.reporter.shown = None
        if self.reporter.operation is not None:
            self.reporter.operation = self.reporter.operation.model_copy(update={"step": name})
        self.log.info("control.step", f"{name}{tag}")
        self.answers.tell(ticket, Phase.PROGRESS, f"{name}{tag}")

    def finish(self, ticket: Ticket, offset: int, code: Code, method: str | None = None) -> None:
        """Step 4 of the writing order."""
        self.reporter.operation = self.reporter.busy_until = None
        self.reporter.applied = max(self.reporter.applied, offset + 1)
        self.reporter.record()
        self.shared.fault("after_second_state")
        name, now = (method or ticket.method)[:64], self.shared.clock.now_ms()
        self.reporter.note(
            DoneOperation(offset=offset, method=name, request_id=ticket.request_id[:64], code=code, finished_ms=now)
        )

    def _answer(self, entry: Entry, ticket: Ticket, code: Code, message: str, result: Result | None = None) -> None:
        """An answer without an effect."""
        self.answers.give(ticket, code, message, result, self.log)
        self.shared.fault("after_response")
        self.finish(ticket, entry.offset, code)

    def _repeat(self, entry: Entry) -> None:
        """The same request again: gives the first one's answer once more."""
        bound = self.shared.index.identities.get(entry.request_id)
        if entry.kind is not Kind.COMMAND or bound is None:
            return
        answer = self.answers.kept(entry.request_id, entry.digest) or self.recall(entry.request_id, entry.digest)
        if answer is not None:
            self.answers.again(answer, entry.traceparent)
        elif bound.offset >= self.reporter.since:
            ticket = replace(Ticket.of(entry, self.shared.clock.now_ms()), offset=bound.offset)
            self.answers.give(ticket, Code.UNKNOWN, "the first answer is no longer in the log", None, self.log)

    def recall(self, request_id: str, digest: str) -> ControlResponse | None:
        """The answer of an earlier process of this worker; waits for the broker. Raises Stopped."""
        topic = self.shared.topics.control_responses
        while True:
            try:
                return recall(self.shared.broker, topic, self.spec.worker_id, request_id, digest)
            except BrokerUnavailable as error:
                self.log.warning("control.recall_waits", str(error))
                self.shared.journal.pause(1.0)

    def status(self, entry: Entry) -> None:
        """Answers `status`, from any thread: it is read ahead of a long operation and waits for no ack."""
        ticket = Ticket.of(entry, self.shared.clock.now_ms())
        internal = {"desired", "schema_version"}
        member = self.reporter.member().model_dump(mode="json", exclude_none=True, exclude=internal)
        expired = entry.expires_ms is not None and ticket.read_ms >= entry.expires_ms
        code = Code.EXPIRED if expired else Code.OK
        response = self.answers.build(ticket, Phase.DONE, code, "", {"member": member})
        self.answers.keep(response)
        self.shared.journal.append(self.shared.journal.response(response, ticket.trace))
        self.shared.metrics.inc("moebus_control_answers_total", method=ticket.method, code=str(code))

    # -- decisions

    def decision(self, entry: Entry, catching_up: bool = False) -> None:
        """The first decision for an update: commit what is staged, or give it up."""
        update = self.shared.index.updates.get(entry.update) if entry.update is not None else None
        if update is None or update.args is None or not update.where.matches(self.spec.worker_id, self.spec.labels):
            return
        ticket = Ticket.of_update(update, self.shared.clock.now_ms())
        ticket.trace = entry.traceparent
        self.bind_log(ticket)
        if self.state.missed == update.offset:
            self._decided_without_us(entry, update, catching_up)
        elif self.state.pending == update.offset:
            if self.keeper.dirty:
                self.keeper.reconcile(open_traffic=False)
            step = Commit(update.offset, update.args) if entry.verdict == "commit" else Discard()
            self.execute(ticket, entry.offset, Run((step,), after_step(self.state, step)), None, str(Method.DECIDE))

    def _decided_without_us(self, entry: Entry, update: Update, catching_up: bool) -> None:
        """A commit of what this worker could not stage: it follows now, or is BEHIND. Its answer stands."""
        if entry.verdict == "commit":
            assert update.args is not None
            phase = Lifecycle.PAUSED if self.state.pending is not None else self.state.phase
            asked = after_step(replace(self.state, fault=None), Commit(update.offset, update.args))
            self.state = replace(asked, phase=phase)
            self.keeper.reconcile(open_traffic=not catching_up)
        else:
            gave_up = self.state.pending is not None
            self.state = after_step(self.state, Discard()) if gave_up else replace(self.state, missed=None)
        self.reporter.applied = max(self.reporter.applied, entry.offset + 1)
        self.reporter.record()

    # -- the engine and the desired state

    def before_job(self) -> None:
        """Runs ahead of every job of the worker's thread."""
        if self.keeper.lost.is_set():
            self.keeper.close_lost()
            self.reporter.record()
            self.settle()

    def lies_open(self) -> bool:
        """Whether the engine takes prompts, as far as it was last seen, though this worker was told to be closed."""
        found = self.reporter.found
        return found is not None and not found.paused and not self.state.running and self.reporter.ready

    def close_again(self) -> None:
        """Closes an engine that lies open: by a call that failed halfway, or by somebody else. Where that fails every
        heartbeat tries again."""
        if not self.lies_open():
            return
        self.reporter.look()
        if not self.lies_open():
            return
        self.log.warning("control.lies_open", "the engine takes prompts and should not; it is closed")
        try:
            self.spec.engine.pause("abort", self.keeper.deadline())
        except Exception as error:
            self.log.error("control.lies_open", str(error), exc=error)
        self.reporter.look()

    def not_ready(self) -> str | None:
        """Why this worker cannot do its work; None when it can."""
        reporter, state = self.reporter, self.state
        if reporter.waiting is not None:
            return f"{self.spec.worker_id}: {reporter.waiting}"
        if state.fault is not None:
            return f"{self.spec.worker_id} is {state.fault}: {state.reason}"
        if self.lies_open():
            return f"{self.spec.worker_id}: the engine takes prompts and should not"
        trouble = self.spec.trouble()
        return None if trouble is None else f"{self.spec.worker_id}: {trouble}"

    def settle(self, doubtful: int | None = None) -> None:
        """Stages a pending update again, reconciles, opens, and says so. `doubtful`: offset of what the last process
        was doing when it ended."""
        if self.state.pending is not None and self.state.pending != self.state.missed:
            self.keeper.reconcile(open_traffic=False)
            self._stage_again(self.state.pending, doubtful == self.state.pending)
        self.keeper.reconcile(open_traffic=True)
        self.reporter.shown = None
        self.reporter.ready = True
        self.reporter.waiting = None
        self.reporter.record()

    def _stage_again(self, offset: int | None, doubtful: bool) -> None:
        update = self.shared.index.updates.get(offset) if offset is not None else None
        if update is None or update.args is None:
            self.state = replace(self.state, pending=None, phase=Lifecycle.PAUSED)
            return
        ticket = Ticket.of_update(update, self.shared.clock.now_ms())
        self.bind_log(ticket)
        answer = self.recall(update.request_id, update.digest) if doubtful else None
        if answer is not None and answer.phase is Phase.DONE:  # it could not stage again, and has said so
            self.state = replace(self.state, missed=offset)
            return
        step = Stage(update.offset, update.args)
        expires = max(update.expires_ms or 0, self.shared.clock.now_ms() + GRACE_MS)
        self.execute(ticket, update.offset, Run((step,), after_step(self.state, step)), expires)

    def void_due(self, now_ms: int, delay_ms: int) -> Update | None:
        """An update for this worker, staged here or not, whose decision is overdue by `delay_ms`."""
        for update in list(self.shared.index.undecided.values()):
            overdue = update.expires_ms is not None and now_ms >= update.expires_ms + delay_ms
            mine = update.offset >= self.reporter.since and update.where.matches(self.spec.worker_id, self.spec.labels)
            if overdue and (mine or update.offset == self.state.pending):
                return update
        return None

    def concerns(self, entry: Entry) -> bool:
        """Whether the entry has to be handled here. A decision is for the targets of what it decides."""
        if entry.kind is Kind.DECIDE and entry.standing is Standing.FIRST:
            return True
        return entry.kind in (Kind.COMMAND, Kind.INVALID, Kind.DECIDE) and self.member.meant_by(entry)
