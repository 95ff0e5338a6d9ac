"""Carrying out the steps of a decision on an engine, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

from pydantic import JsonValue

from moebus.consumers.control.lifecycle import (
    Abort,
    Commit,
    Discard,
    Pause,
    ResetCache,
    Resume,
    Run,
    Sleep,
    Stage,
    State,
    Step,
    Transfer,
    Wake,
    after_step,
)
from moebus.engine.port import (
    Deadline,
    Engine,
    EngineFailed,
    EngineTainted,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnknown,
    Inspection,
    RankFailed,
    Staged,
    Unsupported,
)
from moebus.engine.waiting import Never
from moebus.observability.log import StructuredLogger
from moebus.schemas.control_args import Method, UpdateWeightsArgs
from moebus.schemas.errors import MoebusError
from moebus.schemas.responses import Code, Lifecycle, Residency
from moebus.schemas.tags import Tag

MAX_LISTED = 1000
_BYTES = {Method.SLEEP: "freed_bytes", Method.WAKEUP: "allocated_bytes"}
Result = dict[str, JsonValue]
Watch = Callable[[Step], None]


@dataclass(slots=True)
class Outcome:
    """What an operation answers. `done`: steps that succeeded."""

    code: Code
    message: str
    state: State
    result: Result = field(default_factory=dict)
    done: int = 0


_CODES: tuple[tuple[type[MoebusError], Code], ...] = (
    (EngineTimeout, Code.TIMEOUT),
    (Unsupported, Code.UNSUPPORTED),
    (RankFailed, Code.RANK_FAILED),
    (EngineTainted, Code.TAINTED),
    (EngineUnauthorized, Code.UNAUTHORIZED),
    (EngineUnknown, Code.UNKNOWN),
)


def code_of(error: MoebusError) -> Code:
    """The code a failed step answers with."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Code.FAILED)


def tag_result(step: Sleep | Wake, outcome: str, count: int) -> Result:
    """What an answer says of one tag: `freed_bytes` by a sleep, `allocated_bytes` by a wakeup; neither where it was
    done and the engine does not tell."""
    if outcome == "done" and not count:
        return {"outcome": outcome}
    return {"outcome": outcome, _BYTES[Method.SLEEP if isinstance(step, Sleep) else Method.WAKEUP]: count}


def already_there(tags: Iterable[Tag], method: Method) -> Result:
    """What an answer to `method` says of tags that were there before; nothing of other methods."""
    return {str(tag): {"outcome": "already", _BYTES[method]: 0} for tag in tags if method in _BYTES}


class Effects:
    """One engine's hands. Used by one thread; keeps what is staged in this process."""

    def __init__(self, engine: Engine, log: StructuredLogger) -> None:
        self.engine = engine
        self._log = log
        self._staged: tuple[int, Staged] | None = None
        self._found: Inspection | None = None

    def run(self, run: Run, state: State, deadline: Deadline, watch: Watch, between: Callable[[], None]) -> Outcome:
        """Carries out `run.steps`. `watch` is told each step before it begins, `between` is called after each but the
        last. Sleep and wakeup go on with the next tag where one fails; everything else stops at the first failure."""
        result: Result = {}
        sleeping = any(isinstance(step, Sleep) for step in run.steps)
        tags = already_there(run.tags, Method.SLEEP if sleeping else Method.WAKEUP)
        errors: list[MoebusError] = []
        out = Outcome(Code.OK, "", state, result)
        for number, step in enumerate(run.steps):
            if isinstance(step, Resume) and errors:
                continue
            watch(step)
            try:
                out.state = self._step(step, out.state, deadline, result, tags)
                out.done += 1
            except MoebusError as error:
                errors.append(error)
                if not isinstance(step, (Sleep, Wake)):
                    return self._stopped(step, out, error)
                tags[str(step.tag)] = {**tag_result(step, "failed", 0), "message": str(error)}
            if number + 1 < len(run.steps):
                between()
        if tags:
            result["tags"] = tags
        return self._ended(run, state, out, errors)

    def _ended(self, run: Run, before: State, out: Outcome, errors: list[MoebusError]) -> Outcome:
        after = self._seen(out)
        if not errors:
            code, frozen = Code.PARTIAL if run.short else Code.OK, after.frozen
            return replace(out, code=code, message=run.short, state=replace(run.after, frozen=frozen))
        slept = sum(isinstance(step, Sleep) for step in run.steps)
        none_done = len(errors) == sum(isinstance(step, (Sleep, Wake)) for step in run.steps) and not run.tags
        if before.running and slept == len(errors) and self._open_again(errors):  # refused: left as it was, unpaused
            after = replace(after, phase=Lifecycle.RUNNING)
        code = code_of(errors[0]) if none_done else Code.PARTIAL
        missing = after.missing()
        message = "; ".join(map(str, errors)) + (f"; not resumed: {missing}" if run.after.running and missing else "")
        fault = run.after.fault or after.fault
        after = replace(after, run=run.after.run, fault=fault, transferring=run.after.transferring)
        return replace(out, code=code, message=message, state=after)

    def _open_again(self, errors: list[MoebusError]) -> bool:
        try:
            self.engine.resume()
        except MoebusError as error:
            errors.append(error)
            return False
        return True

    def _stopped(self, step: Step, out: Outcome, error: MoebusError) -> Outcome:
        self._log.warning("control.step_failed", str(error), step=type(step).__name__)
        state, code = self._seen(out), code_of(error)
        if isinstance(step, Stage):
            # A process before this one voted with `staged`: that binds until the decision, which may be a commit.
            bound = state.pending if state.pending == step.offset else None
            updating = state.phase is Lifecycle.UPDATING and not state.transferring and bound is None
            phase = Lifecycle.PAUSED if updating else state.phase
            state = replace(state, missed=step.offset, pending=bound, phase=phase)
        elif isinstance(step, Commit):
            state, code = self._commit_failed(step.offset, step.args, state, error)
        elif isinstance(step, Transfer) and step.args.step != "init":
            cut = isinstance(error, (EngineTainted, EngineTimeout)) or self._tainted()
            if cut:
                code = code if code is Code.RANK_FAILED else Code.TAINTED
                state = tainted(state, f"transfer {step.args.step} was cut off: {error}")
        return replace(out, code=code, message=str(error), state=state)

    def _commit_failed(
        self, offset: int, args: UpdateWeightsArgs, state: State, error: MoebusError
    ) -> tuple[State, Code]:
        """The decision stands: the worker cannot follow it and must not serve."""
        asked = replace(
            state, phase=Lifecycle.PAUSED, pending=None, missed=None, version=args.version, version_offset=offset
        )
        if isinstance(error, EngineTainted) or self._tainted():
            return tainted(asked, str(error)), Code.RANK_FAILED if isinstance(error, RankFailed) else Code.TAINTED
        return behind(asked, str(error), self._inspect()), Code.BEHIND

    def _step(self, step: Step, state: State, deadline: Deadline, result: Result, tags: Result) -> State:
        """The state after one step. Raises MoebusError; an error that the port does not know becomes EngineFailed."""
        try:
            return self._apply(step, state, deadline, result, tags)
        except MoebusError:
            raise
        except Exception as error:
            self._log.error("control.engine_error", str(error), exc=error, step=type(step).__name__)
            raise EngineFailed(f"{type(error).__name__}: {error}") from error

    def _apply(self, step: Step, state: State, deadline: Deadline, result: Result, tags: Result) -> State:
        after = after_step(state, step)
        if isinstance(step, Pause):
            return self._pause(step, after, deadline, result)
        if isinstance(step, Resume):
            self.engine.resume()
        elif isinstance(step, Sleep):
            tags[str(step.tag)] = tag_result(step, "done", self.engine.sleep(step.tag, step.level, deadline))
        elif isinstance(step, Wake):
            tags[str(step.tag)] = tag_result(step, "done", self.engine.wakeup(step.tag, step.weights, deadline))
        elif isinstance(step, Stage):
            result.update(self._stage(step.offset, step.args, deadline))
        elif isinstance(step, Commit):
            result.update(self._commit(step, deadline))
        elif isinstance(step, Discard):
            self.drop()
        elif isinstance(step, Transfer):
            self._transfer(step, deadline)
        elif isinstance(step, ResetCache):
            result["cache_blocks_dropped"] = self.engine.reset_cache()
        else:
            self._abort(step, result)
        return after

    def _pause(self, step: Pause, after: State, deadline: Deadline, result: Result) -> State:
        drained = self.engine.pause(step.mode, deadline)
        result["pause"] = {
            "aborted": drained.aborted,
            "finished": drained.finished,
            "frozen": drained.frozen,
            "idle_confirmed": drained.idle_confirmed,
        }
        return replace(after, frozen=drained.frozen > 0)

    def _abort(self, step: Abort, result: Result) -> None:
        ended = self.engine.abort_requests(step.ids)
        result["aborted"] = [*ended[:MAX_LISTED]]
        result["aborted_count"] = len(ended)
        if step.ids is not None:
            known = set(ended)
            result["not_found"] = [*[name for name in step.ids if name not in known][:MAX_LISTED]]

    def _stage(self, offset: int, args: UpdateWeightsArgs, deadline: Deadline) -> Result:
        self.drop()
        staged = self.engine.stage(args.version, args.source, args.digest, deadline, args.options)
        self._staged = (offset, staged)
        result: Result = {"staged": staged.kind, "version": staged.version}
        if staged.weights_digest is not None:
            result["weights_digest"] = staged.weights_digest
        return result

    def _commit(self, step: Commit, deadline: Deadline) -> Result:
        """Commits what is staged; a process that did not stage it stages it first."""
        if self._staged is None or self._staged[0] != step.offset:
            self._stage(step.offset, step.args, Never())
        assert self._staged is not None
        staged = self._staged[1]
        self._staged = None
        self.engine.commit(staged, step.args.cache, Never())
        digest = self._inspect_digest() or staged.weights_digest
        self._together()
        result: Result = {"version": staged.version}
        return result | {"weights_digest": digest} if digest is not None else result

    def _transfer(self, step: Transfer, deadline: Deadline) -> None:
        self.engine.transfer(step.args.step, step.args.version, step.args.info, deadline)
        if step.args.step == "finish":
            self._inspect()
            self._together()

    def _together(self) -> None:
        """Every rank holds the version that the engine says it has. Raises RankFailed."""
        if self._found is not None and self._found.apart:
            raise RankFailed(f"{self._found.apart}; update the weights")

    def load(self, step: Commit) -> None:
        """Stages and commits outside any command. Raises MoebusError as the engine does."""
        self._step(step, State(), Never(), {}, {})

    def drop(self) -> None:
        """Gives up what is staged."""
        staged, self._staged = self._staged, None
        if staged is not None:
            self.engine.discard(staged[1])

    def forget(self) -> None:
        """What was staged is gone with the engine's memory."""
        self._staged = None

    def observe(self, state: State) -> State:
        """`state` with tags and frozen requests as the engine has them; as it is where the engine does not say."""
        found = self._inspect()
        if found is None:
            return state
        for tag, held in found.resident.items():
            state = state.with_tag(tag, Residency.RESIDENT if held else Residency.ASLEEP)
        return replace(state, frozen=found.frozen > 0)

    def _seen(self, out: Outcome) -> State:
        """`observe` at the end of an operation; what else of the engine took part is named in the answer."""
        state = self.observe(out.state)
        if self._found is not None and self._found.participants:
            out.result["participants"] = [
                {**asdict(one), "cut": [*one.cut[:MAX_LISTED]]} for one in self._found.participants
            ]
        if self._found is not None and self._found.ranks:
            out.result["ranks"] = {str(one.rank): {"version": one.version} for one in self._found.ranks}
        return state

    def _inspect(self) -> Inspection | None:
        try:
            self._found = self.engine.inspect()
        except Exception as error:
            self._log.warning("control.inspect_failed", str(error))
            self._found = None
        return self._found

    def _tainted(self) -> bool:
        found = self._inspect()
        return found is not None and found.tainted

    def _inspect_digest(self) -> str | None:
        found = self._inspect()
        return None if found is None else found.weights_digest


def tainted(state: State, reason: str) -> State:
    """`state` with memory that may be mixed. A staged update stays: it may be the cure."""
    return replace(_closed(state), fault=Lifecycle.TAINTED, reason=reason, holds=None)


def behind(state: State, reason: str, found: Inspection | None) -> State:
    """`state` with memory that is whole and not what was asked for."""
    holds = None if found is None else found.version
    return replace(_closed(state), fault=Lifecycle.BEHIND, reason=reason, holds=holds)


def _closed(state: State) -> State:
    """The phase that commands ask for stays, so that a cured worker can go back to it."""
    updating = state.phase is Lifecycle.UPDATING and state.pending is None
    return replace(state, phase=Lifecycle.PAUSED if updating else state.phase, transferring=False)
