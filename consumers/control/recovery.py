"""Start of a worker: what it records, what it missed, and the operation a crash left in doubt (design section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moebus.consumers.control.answers import Ticket
from moebus.consumers.control.effects import behind, code_of, tainted
from moebus.consumers.control.fold import fold
from moebus.consumers.control.lifecycle import (
    RESIDENT,
    Commit,
    Pause,
    ResetCache,
    Run,
    State,
    after_step,
    decide,
)
from moebus.consumers.control.log_index import Entry, Kind, Update
from moebus.consumers.control.state_record import from_record
from moebus.consumers.control.worker import GRACE_MS, Worker
from moebus.engine.port import EngineUnreachable, Inspection
from moebus.schemas.control_args import Method, TransferWeightsArgs
from moebus.schemas.errors import MoebusError
from moebus.schemas.members import MemberState
from moebus.schemas.responses import Code, ControlResponse, Lifecycle, Phase, Weights, WorkerState
from moebus.schemas.tags import Tag


def take_over(worker: Worker, prior: MemberState | None, history: Sequence[Entry], hello: int) -> None:
    """Runs on the worker's thread once no other process touches the engine.

    `prior`: the last state of this worker, None for a new one. `history`: all entries read so far. `hello`: offset of
    this process's own. Afterwards the worker has answered what it missed and is in the desired state, or BEHIND or
    TAINTED with the reason. Raises Stopped.
    """
    since = hello if prior is None or prior.applied is None else prior.applied
    index, reporter = worker.shared.index, worker.reporter
    folded = fold(index, worker.member, (entry for entry in history if entry.offset < since), State())
    reporter.since = reporter.applied = since
    if prior is None:
        worker.state, worker.keeper.same_engine = folded, False
    else:
        worker.state = from_record(prior.desired or {})
        worker.keeper.same_engine = prior.engine_id == reporter.engine_id
        reporter.operation = prior.operation
        if prior.state is not None:
            reporter.digest, reporter.digest_of = prior.weights_digest, prior.state.version
    reporter.waiting = "answering what was missed"
    doubtful = None if prior is None or prior.operation is None else prior.operation.offset
    reporter.record()
    worker.taken_over.set()
    for entry in history:
        if entry.offset < since or not worker.concerns(entry):
            continue
        if entry.offset == doubtful:
            settle_doubt(worker, entry)
        else:
            worker.handle(entry, catching_up=True)
    reporter.operation = None
    reporter.applied = max([reporter.applied, *(entry.offset + 1 for entry in history[-1:])])
    worker.settle(doubtful)


def settle_doubt(worker: Worker, entry: Entry) -> None:
    """Deals with the entry whose operation was in progress when the last process ended."""
    index = worker.shared.index
    update = index.updates.get(entry.update) if entry.kind is Kind.DECIDE and entry.update is not None else None
    now = worker.shared.clock.now_ms()
    ticket = Ticket.of_update(update, now) if update is not None else Ticket.of(entry, now)
    worker.bind_log(ticket)
    worker.log.warning("control.in_doubt", "the last process ended during this operation")
    answer = worker.recall(ticket.request_id, ticket.digest)
    if answer is not None and (answer.phase is Phase.DONE or entry.kind is Kind.COMMAND):
        _adopt(worker, entry, update, answer)
        worker.answers.keep(answer)
        worker.finish(ticket, entry.offset, answer.code)
    elif update is not None:
        _doubtful_decision(worker, entry, update, ticket)
    elif entry.kind is Kind.COMMAND:
        _doubtful_command(worker, entry, ticket)
    worker.reporter.operation = None


def _adopt(worker: Worker, entry: Entry, update: Update | None, answer: ControlResponse) -> None:
    """The answer is in the log: the state becomes what it says."""
    worker.keeper.dirty = True
    if update is not None and update.args is not None and answer.code is Code.OK:
        worker.state = after_step(worker.state, Commit(update.offset, update.args))
        return
    if answer.code in (Code.OK, Code.ALREADY) and entry.kind is Kind.COMMAND:
        decision = decide(worker.state, entry.command, worker.member.can, None)
        worker.state = decision.after if isinstance(decision, Run) else worker.state
    elif answer.state is not None:
        worker.state = _from_view(worker.state, answer.state)
        if entry.kind is Kind.COMMAND and entry.command.method is Method.UPDATE_WEIGHTS:
            worker.state = replace(worker.state, missed=entry.offset)


def _from_view(state: State, view: WorkerState) -> State:
    fault = view.lifecycle if view.lifecycle in (Lifecycle.TAINTED, Lifecycle.BEHIND) else None
    phase = Lifecycle.RUNNING if view.lifecycle is Lifecycle.RUNNING else Lifecycle.PAUSED
    tags = {tag: view.tags.get(tag, RESIDENT) for tag in Tag}
    return replace(
        state, phase=phase, fault=fault, weights=view.weights, weight=tags[Tag.WEIGHT], kv_cache=tags[Tag.KV_CACHE],
        run=view.run, pending=None, transferring=False,
    )  # fmt: skip


def _doubtful_decision(worker: Worker, entry: Entry, update: Update, ticket: Ticket) -> None:
    """A commit that may have begun: verified, or loaded again, else TAINTED. A void is repeated."""
    assert update.args is not None
    step = Commit(update.offset, update.args)
    old = worker.state.version
    worker.state = replace(worker.state, pending=update.offset, phase=Lifecycle.UPDATING)
    found = _inspect(worker)
    holds = _holds(found)
    digest = update.args.digest.lower() if update.args.digest else None
    same_digest = digest is None or found.weights_digest in (None, digest)
    loaded = worker.keeper.same_engine and holds and same_digest and found.version == step.args.version
    if entry.verdict == "commit" and loaded:
        worker.state = after_step(worker.state, step)
        worker.answers.give(ticket, Code.OK, "", {"version": step.args.version, "verified": True}, worker.log)
        worker.finish(ticket, entry.offset, Code.OK, str(Method.DECIDE))
        return
    mixed = worker.keeper.same_engine and not (holds and found.version == old)
    if mixed:  # nothing else can be done before the load; the engine may not serve meanwhile
        worker.spec.engine.pause("abort", worker.keeper.deadline())
        worker.keeper.dirty = False
    worker.decision(entry, True)
    if mixed and worker.state.fault is Lifecycle.BEHIND:
        worker.state = tainted(worker.state, worker.state.reason or "a commit was cut off")
        worker.reporter.record()


def _inspect(worker: Worker) -> Inspection:
    """Waits for a server that went away meanwhile. Raises Stopped."""
    while True:
        try:
            return worker.spec.engine.inspect()
        except EngineUnreachable as error:
            worker.reporter.waiting = str(error)
            worker.shared.journal.pause(1.0)


def _holds(found: Inspection) -> bool:
    """The engine holds one version, whole and on every rank."""
    resident = found.resident.get(Tag.WEIGHT, False)
    return resident and found.weights_valid and not found.tainted and not found.apart


def _doubtful_command(worker: Worker, entry: Entry, ticket: Ticket) -> None:
    method, offset = entry.command.method, entry.offset
    if method is Method.ABORT_REQUESTS:
        _give(worker, ticket, offset, Code.UNKNOWN, "the last process ended while it aborted requests; not repeated")
    elif method is Method.TRANSFER_WEIGHTS:
        _doubtful_transfer(worker, entry, ticket)
    elif method is Method.UPDATE_WEIGHTS:
        _doubtful_update(worker, entry, ticket)
    else:
        _drive_to_target(worker, entry, ticket)


def _doubtful_update(worker: Worker, entry: Entry, ticket: Ticket) -> None:
    if worker.keeper.dirty:
        worker.keeper.reconcile(open_traffic=False)
    decision = decide(worker.state, entry.command, worker.member.can, None)
    if isinstance(decision, Run):
        expires = max(entry.expires_ms or 0, worker.shared.clock.now_ms() + GRACE_MS)
        worker.execute(ticket, entry.offset, decision, expires)
    else:
        _give(worker, ticket, entry.offset, Code.FAILED, decision.message)


def _drive_to_target(worker: Worker, entry: Entry, ticket: Ticket) -> None:
    """The engine is brought to where the command leads, from wherever the crash left it."""
    decision = decide(worker.state, entry.command, worker.member.can, None)
    if not isinstance(decision, Run):
        _give(worker, ticket, entry.offset, Code.ALREADY, decision.message)
        return
    try:
        _pause_as_asked(worker, decision)
    except Exception as error:  # whatever an engine raises is its answer, and no end of this process
        code = code_of(error) if isinstance(error, MoebusError) else Code.FAILED
        _give(worker, ticket, entry.offset, code, str(error))
        return
    before, worker.state = worker.state, decision.after
    worker.member.entered(before.run, decision.after.run)
    worker.keeper.reconcile(open_traffic=entry.command.method in (Method.RESUME, Method.WAKEUP))
    _reset_as_asked(worker, decision)
    fault = worker.state.fault
    code = Code.OK if fault is None else Code.TAINTED if fault is Lifecycle.TAINTED else Code.BEHIND
    if code is Code.OK and decision.short:
        code = Code.PARTIAL
    _give(worker, ticket, entry.offset, code, worker.state.reason or decision.short or "completed after a restart")


def _pause_as_asked(worker: Worker, run: Run) -> None:
    """Requests that lived on in the engine are drained by the mode of the command; a reconciliation knows abort alone.

    Raises as the engine does; admission is then open again.
    """
    for step in run.steps:
        if isinstance(step, Pause):
            worker.spec.engine.pause(step.mode, worker.keeper.deadline())


def _reset_as_asked(worker: Worker, run: Run) -> None:
    """Again, if the last process had come so far: an old prefix must not meet new weights."""
    if ResetCache() in run.steps:
        worker.spec.engine.reset_cache()


def _doubtful_transfer(worker: Worker, entry: Entry, ticket: Ticket) -> None:
    args = entry.command.args
    assert isinstance(args, TransferWeightsArgs)
    found = _inspect(worker)
    if args.step == "init":
        _give(worker, ticket, entry.offset, Code.UNKNOWN, "the last process ended during init; init again")
    elif not worker.keeper.same_engine:
        reason = "the engine was lost during a weight transfer; transfer or update again"
        worker.state = behind(replace(worker.state, weights=Weights.EMPTY), reason, found)
        _give(worker, ticket, entry.offset, Code.BEHIND, reason)
    elif args.step == "finish" and _holds(found) and found.version == args.version:
        decision = decide(worker.state, entry.command, worker.member.can, None)
        if isinstance(decision, Run):
            _reset_as_asked(worker, decision)
            worker.state = decision.after
        _give(worker, ticket, entry.offset, Code.OK, "completed after a restart")
    else:
        worker.state = tainted(worker.state, f"a weight transfer was cut off in {args.step}")
        _give(worker, ticket, entry.offset, Code.TAINTED, worker.state.reason or "")


def _give(worker: Worker, ticket: Ticket, offset: int, code: Code, message: str) -> None:
    worker.answers.give(ticket, code, message, None, worker.log)
    worker.finish(ticket, offset, code)
