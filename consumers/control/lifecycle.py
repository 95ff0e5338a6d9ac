"""The lifecycle of a worker, pure: what a command means in a state, and the state after each step (design 3.4).

`decide` takes values and the time and returns values; nothing here touches an engine or the log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from moebus.engine.port import CacheMode, Capabilities, Level, PauseMode, WakeWeights
from moebus.schemas.base import StrictModel
from moebus.schemas.control_args import (
    STATE_CHANGING,
    AbortRequestsArgs,
    BeginRunArgs,
    Method,
    PauseArgs,
    SleepArgs,
    TransferWeightsArgs,
    UpdateWeightsArgs,
    WakeupArgs,
)
from moebus.schemas.responses import Code, Lifecycle, Residency, Weights, WorkerState
from moebus.schemas.tags import ALL_TAGS, Tag

M = TypeVar("M", bound=StrictModel)
RESIDENT, ASLEEP = Residency.RESIDENT, Residency.ASLEEP


@dataclass(frozen=True, slots=True)
class State:
    """What commands have made of a worker.

    `phase`: STARTING, RUNNING, DRAINING, PAUSED or UPDATING; `fault`: None, TAINTED or BEHIND. `version` is the one
    that commands ask for, None: as in memory; `version_offset`: log position of the command that set it, None: the
    engine's own. `holds`: version in memory while BEHIND. `pending`: log position of a staged update. `missed`: of
    one that could not be staged here and may still be committed. `frozen`: requests are held by `keep`.
    """

    phase: Lifecycle = Lifecycle.RUNNING
    fault: Lifecycle | None = None
    weight: Residency = RESIDENT
    kv_cache: Residency = RESIDENT
    weights: Weights = Weights.VALID
    version: str | None = None
    version_offset: int | None = None
    run: str | None = None
    frozen: bool = False
    transferring: bool = False
    pending: int | None = None
    missed: int | None = None
    holds: str | None = None
    reason: str | None = None

    @property
    def lifecycle(self) -> Lifecycle:
        """The one word of section 3.4."""
        return self.fault if self.fault is not None and self.phase is not Lifecycle.UPDATING else self.phase

    @property
    def running(self) -> bool:
        return self.phase is Lifecycle.RUNNING and self.fault is None

    def tag(self, tag: Tag) -> Residency:
        return self.weight if tag is Tag.WEIGHT else self.kv_cache

    def with_tag(self, tag: Tag, residency: Residency) -> State:
        return replace(self, weight=residency) if tag is Tag.WEIGHT else replace(self, kv_cache=residency)

    def missing(self) -> str:
        """What stands between this state and serving, for people; empty when nothing does."""
        parts = [f"{tag} is asleep" for tag in ALL_TAGS if self.tag(tag) is ASLEEP]
        if self.weights is Weights.EMPTY:
            parts.append("weights hold nothing")
        if self.transferring:
            parts.append("a weight transfer is open")
        return ", ".join(parts)

    def view(self) -> WorkerState:
        """The state as answers and members show it."""
        known = self.version if self.fault is None else self.holds if self.fault is Lifecycle.BEHIND else None
        version = known if self.weights is Weights.VALID and not self.transferring else None
        tags = {Tag.WEIGHT: self.weight, Tag.KV_CACHE: self.kv_cache}
        return WorkerState(lifecycle=self.lifecycle, tags=tags, weights=self.weights, version=version, run=self.run)


@dataclass(frozen=True, slots=True)
class Pause:
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resume:
    pass


@dataclass(frozen=True, slots=True)
class Sleep:
    tag: Tag
    level: Level


@dataclass(frozen=True, slots=True)
class Wake:
    tag: Tag
    weights: WakeWeights


@dataclass(frozen=True, slots=True)
class Stage:
    offset: int
    args: UpdateWeightsArgs


@dataclass(frozen=True, slots=True)
class Commit:
    offset: int
    args: UpdateWeightsArgs


@dataclass(frozen=True, slots=True)
class Discard:
    pass


@dataclass(frozen=True, slots=True)
class Transfer:
    offset: int
    args: TransferWeightsArgs


@dataclass(frozen=True, slots=True)
class ResetCache:
    pass


@dataclass(frozen=True, slots=True)
class Abort:
    ids: tuple[str, ...] | None


Step = Pause | Resume | Sleep | Wake | Stage | Commit | Discard | Transfer | ResetCache | Abort


@dataclass(frozen=True, slots=True)
class Command:
    """A command for `decide`. `offset`: its log position. `expires_ms`: broker time, None without a deadline."""

    method: Method
    args: StrictModel
    offset: int
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing is done."""

    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class Already:
    """The worker is where the command wants it; `after` where the state it would return to changes."""

    message: str
    tags: tuple[Tag, ...] = ()
    after: State | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """`steps` lead to `after`. `tags`: those asked for that were there before. `short`: what keeps it `partial`."""

    steps: tuple[Step, ...]
    after: State
    tags: tuple[Tag, ...] = ()
    short: str = ""


Decision = Refuse | Already | Run


def decide(state: State, command: Command, can: Capabilities, now_ms: int | None) -> Decision:
    """What `command` means in `state` for an engine that can `can`. `now_ms` None: deadlines are ignored."""
    if now_ms is not None and command.expires_ms is not None and now_ms >= command.expires_ms:
        return Refuse(Code.EXPIRED, f"read {(now_ms - command.expires_ms) / 1000:.1f} s after its deadline")
    if command.method is Method.STATUS:
        return Run((), state)
    if state.phase in (Lifecycle.STARTING, Lifecycle.DRAINING):
        return Refuse(Code.ILLEGAL_STATE, f"the worker is {state.phase}")
    if state.pending is not None and command.method in STATE_CHANGING:
        return Refuse(Code.CONFLICT, f"the update at offset {state.pending} is staged and not decided")
    return _BY_METHOD[command.method](state, command, can)


def _pause(state: State, command: Command, can: Capabilities) -> Decision:
    args = _args(command, PauseArgs)
    if args.mode not in can.pause_modes:
        return Refuse(Code.UNSUPPORTED, f"this engine cannot pause with mode {args.mode}")
    if not state.running and not (state.frozen and args.mode == "abort"):
        shut = state.phase is Lifecycle.RUNNING  # closed by a fault alone
        after = replace(state, phase=Lifecycle.PAUSED) if shut else None
        return Already(f"the worker is {state.lifecycle}", after=after)
    return _run(state, (Pause(args.mode),))


def _resume(state: State, command: Command, can: Capabilities) -> Decision:
    if state.running:
        return Already("the worker is RUNNING")
    return _closed(state) or _run(state, (Resume(),))


def _sleep(state: State, command: Command, can: Capabilities) -> Decision:
    args = _args(command, SleepArgs)
    todo = tuple(tag for tag in args.tags if state.tag(tag) is RESIDENT)
    there = tuple(tag for tag in args.tags if tag not in todo)
    if not todo:
        return Already(f"{' and '.join(map(str, args.tags))} asleep", there)
    refused = _cannot_sleep(state, args, todo, can)
    if refused is not None:
        return refused
    pause: tuple[Step, ...] = (Pause(args.mode),) if state.running else ()
    return _run(state, (*pause, *(Sleep(tag, args.level) for tag in todo)), there)


def _cannot_sleep(state: State, args: SleepArgs, todo: tuple[Tag, ...], can: Capabilities) -> Refuse | None:
    for tag in todo:
        if tag not in can.tags:
            return Refuse(Code.UNSUPPORTED, f"this engine cannot put {tag} to sleep")
        if args.level not in can.levels.get(tag, frozenset()):
            return Refuse(Code.UNSUPPORTED, f"this engine cannot {args.level} {tag}")
    if can.sleeps_whole and (left := [tag for tag in can.tags if tag not in todo and state.tag(tag) is RESIDENT]):
        return Refuse(Code.UNSUPPORTED, f"this engine cannot put {todo[0]} to sleep alone; name {left[0]} too")
    if state.running and args.mode not in can.pause_modes:
        return Refuse(Code.UNSUPPORTED, f"this engine cannot pause with mode {args.mode}")
    if Tag.KV_CACHE in todo and (state.frozen or (state.running and args.mode == "keep")):
        return Refuse(Code.ILLEGAL_STATE, "kv_cache cannot sleep over requests frozen by keep; abort them first")
    if Tag.WEIGHT in todo and state.transferring:
        return Refuse(Code.ILLEGAL_STATE, "weight cannot sleep: a weight transfer is open")
    return None


def _wakeup(state: State, command: Command, can: Capabilities) -> Decision:
    args = _args(command, WakeupArgs)
    refill = args.weights == "restore" and state.weights is Weights.EMPTY
    todo = tuple(tag for tag in args.tags if state.tag(tag) is ASLEEP or (tag is Tag.WEIGHT and refill))
    there = tuple(tag for tag in args.tags if tag not in todo)
    if args.resume and state.fault is not None:
        return Refuse(_fault_code(state), f"the worker is {state.lifecycle}: {state.reason or 'update it first'}")
    if Tag.WEIGHT in todo and state.transferring:
        return Refuse(Code.ILLEGAL_STATE, "weight cannot wake: a weight transfer is open")
    if todo and can.wakes_whole and (left := [tag for tag in set(can.tags) - {*todo} if state.tag(tag) is ASLEEP]):
        return Refuse(Code.UNSUPPORTED, f"this engine cannot wake {todo[0]} alone; name {left[0]} too")
    steps: tuple[Step, ...] = tuple(Wake(tag, args.weights) for tag in todo)
    short = ""
    if args.resume and not state.running:
        short = _after(state, steps).missing()
        steps = steps if short else (*steps, Resume())
    if not steps and not short:
        return Already(f"{' and '.join(map(str, args.tags))} resident", there)
    return replace(_run(state, steps, there), short=f"not resumed: {short}" if short else "")


def _update(state: State, command: Command, can: Capabilities) -> Decision:
    args = _args(command, UpdateWeightsArgs)
    return _cannot_write(state, args.cache, can) or _run(state, (Stage(command.offset, args),))


def _cannot_write(state: State, cache: CacheMode, can: Capabilities) -> Refuse | None:
    if cache not in can.cache_modes:
        return Refuse(Code.UNSUPPORTED, f"this engine cannot treat its cache with {cache}")
    if state.running:
        return Refuse(Code.ILLEGAL_STATE, "the worker is RUNNING; pause it first")
    if state.weight is ASLEEP:
        return Refuse(Code.ILLEGAL_STATE, "weight is asleep; wake it first")
    return None


def _transfer(state: State, command: Command, can: Capabilities) -> Decision:
    args = _args(command, TransferWeightsArgs)
    if not can.transfer:
        return Refuse(Code.UNSUPPORTED, "this engine cannot receive a weight transfer")
    refused = _cannot_write(state, args.cache, can)
    if refused is not None:
        return refused
    if args.step in ("update", "finish") and not state.transferring:
        return Refuse(Code.ILLEGAL_STATE, f"{args.step} without start")
    # `recompute`: what was cached under the old weights is computed again, so it goes too.
    reset = args.step == "finish" and args.cache != "keep" and state.kv_cache is RESIDENT
    return _run(state, (Transfer(command.offset, args), *((ResetCache(),) if reset else ())))


def _reset_cache(state: State, command: Command, can: Capabilities) -> Decision:
    return Already("kv_cache is asleep and holds nothing") if state.kv_cache is ASLEEP else _run(state, (ResetCache(),))


def _abort(state: State, command: Command, can: Capabilities) -> Decision:
    args = _args(command, AbortRequestsArgs)
    if not can.abort:
        return Refuse(Code.UNSUPPORTED, "this engine cannot abort single requests")
    return _run(state, (Abort(None if args.ids is None else tuple(args.ids)),))


def _begin_run(state: State, command: Command, can: Capabilities) -> Decision:
    args = _args(command, BeginRunArgs)
    pause: tuple[Step, ...] = (Pause("abort"),) if state.running or state.frozen else ()
    wake = tuple(Wake(tag, "restore") for tag in ALL_TAGS if state.tag(tag) is ASLEEP)
    run = _run(state, (*pause, *wake))
    after = replace(run.after, run=args.run, missed=None, phase=Lifecycle.PAUSED)
    if state.transferring:
        cut = "a run began while a weight transfer was open"
        after = replace(after, transferring=False, fault=Lifecycle.TAINTED, reason=cut)
    return replace(run, after=after)


_BY_METHOD = {
    Method.PAUSE: _pause,
    Method.RESUME: _resume,
    Method.SLEEP: _sleep,
    Method.WAKEUP: _wakeup,
    Method.UPDATE_WEIGHTS: _update,
    Method.TRANSFER_WEIGHTS: _transfer,
    Method.RESET_CACHE: _reset_cache,
    Method.ABORT_REQUESTS: _abort,
    Method.BEGIN_RUN: _begin_run,
}


def after_step(state: State, step: Step) -> State:
    """The state once `step` has succeeded."""
    if isinstance(step, Pause):
        phase = state.phase if state.transferring else Lifecycle.PAUSED  # ending frozen requests ends no transfer
        return replace(state, phase=phase, frozen=step.mode == "keep")
    if isinstance(step, Resume):
        return replace(state, phase=Lifecycle.RUNNING, frozen=False)
    if isinstance(step, Sleep):
        closed = Lifecycle.PAUSED if state.phase is Lifecycle.RUNNING else state.phase
        return replace(state.with_tag(step.tag, ASLEEP), phase=closed)
    if isinstance(step, Wake):
        return _after_wake(state, step)
    if isinstance(step, Stage):
        return replace(state, phase=Lifecycle.UPDATING, pending=step.offset, missed=None)
    if isinstance(step, Commit):
        return _loaded(state, step.args.version, step.offset)
    if isinstance(step, Discard):
        phase = Lifecycle.UPDATING if state.transferring else Lifecycle.PAUSED
        return replace(state, phase=phase, pending=None, missed=None)
    if isinstance(step, Transfer):
        return _after_transfer(state, step)
    return state


def _after_wake(state: State, step: Wake) -> State:
    woken = state.with_tag(step.tag, RESIDENT)
    if step.tag is not Tag.WEIGHT:
        return woken
    return replace(woken, weights=Weights.VALID if step.weights == "restore" else Weights.EMPTY)


def _after_transfer(state: State, step: Transfer) -> State:
    if step.args.step == "start":
        return replace(state, phase=Lifecycle.UPDATING, transferring=True, weights=Weights.EMPTY)
    return _loaded(state, step.args.version, step.offset) if step.args.step == "finish" else state


def _loaded(state: State, version: str | None, offset: int) -> State:
    return replace(
        state, phase=Lifecycle.PAUSED, fault=None, reason=None, holds=None, weights=Weights.VALID, version=version,
        version_offset=offset, transferring=False, pending=None, missed=None,
    )  # fmt: skip


def _after(state: State, steps: tuple[Step, ...]) -> State:
    for step in steps:
        state = after_step(state, step)
    return state


def _run(state: State, steps: tuple[Step, ...], tags: tuple[Tag, ...] = ()) -> Run:
    return Run(steps, _after(state, steps), tags)


def _closed(state: State) -> Refuse | None:
    """Why the worker must not serve."""
    if state.fault is not None:
        return Refuse(_fault_code(state), f"the worker is {state.lifecycle}: {state.reason or 'update it first'}")
    missing = state.missing()
    return Refuse(Code.ILLEGAL_STATE, missing) if missing else None


def _fault_code(state: State) -> Code:
    return Code.TAINTED if state.fault is Lifecycle.TAINTED else Code.BEHIND


def _args(command: Command, model: type[M]) -> M:
    assert isinstance(command.args, model)
    return command.args
