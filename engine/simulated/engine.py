"""SimulatedEngine: the Engine port without a model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moebus.engine.admission import Admission, Ticket
from moebus.engine.hooks import Hook, no_hook
from moebus.engine.options import check_options
from moebus.engine.port import (
    CacheMode,
    Capabilities,
    Deadline,
    EngineFailed,
    EngineTainted,
    EngineTimeout,
    FinishReason,
    Generation,
    Inspection,
    Level,
    PauseMode,
    PauseResult,
    Prompt,
    Staged,
    StageKind,
    WakeWeights,
)
from moebus.engine.prompts import check_prompt
from moebus.engine.simulated.config import SimulatedConfig
from moebus.engine.simulated.faults import Faults
from moebus.engine.simulated.memory import SimulatedMemory
from moebus.engine.simulated.prefix import PrefixCache
from moebus.engine.simulated.rendezvous import Rendezvous, tensor_names
from moebus.engine.simulated.running import Running
from moebus.engine.simulated.staging import Staging
from moebus.engine.waiting import check_deadline
from moebus.schemas.errors import MoebusError
from moebus.schemas.tags import ALL_TAGS, Tag

_LEVELS: frozenset[Level] = frozenset(("offload", "discard"))
CAPABILITIES = Capabilities(
    pause_modes=frozenset(("abort", "wait", "keep")),
    levels=dict.fromkeys(ALL_TAGS, _LEVELS),
    tags=frozenset(ALL_TAGS),
    stage="loaded",
    cache_modes=frozenset(("reset", "keep", "recompute")),
    transfer=True,
    abort=True,
)


class SimulatedEngine:
    """A GeneratingEngine whose tokens and routes are hashes of (seed, version, tokens so far).

    It has no thread: a request is computed by the thread that called `generate`. `hook` delays or breaks it at
    named points; `stage` is how far it stages; `ranks`: processes it is spread over; `fail_next` and `lag` plan
    failures; `lose` is a restart of the engine behind its worker's back.
    """

    kind = "simulated"

    def __init__(
        self,
        config: SimulatedConfig | None = None,
        *,
        version: str = "initial",
        allowed_roots: Sequence[str] = (),
        stage: StageKind = "loaded",
        ranks: int = 1,
        hook: Hook = no_hook,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or SimulatedConfig()
        self.hook = hook
        self._clock = clock
        self._admission = Admission()
        self._memory = SimulatedMemory(self.config, version, tuple(allowed_roots), ranks)
        self._cache = PrefixCache(self.config)
        self._cache.reset(version)
        self._faults = Faults()
        self._identity = uuid.uuid4().hex
        self._staging = Staging(stage, self._memory)

    # -- drills

    def fail_next(self, method: str, error: MoebusError, times: int = 1) -> None:
        """The next `times` calls of `method` (a name of the port) raise `error`; EngineTainted in `commit` or
        `transfer` taints the weights too, any other error leaves the engine as it was."""
        self._faults.plan(method, error, times)

    def lag(self, rank: int) -> None:
        """The next new weights do not come to this rank, and the engine does not notice."""
        with self._admission.changed:
            self._memory.lagging.add(rank)

    def lose(self) -> None:
        """The engine restarts: new identity, first weights, empty cache, open admission; requests inside fail."""
        with self._admission.changed:
            old, self._admission = self._admission, Admission()
            self._memory.reboot()
            self._cache.reset(self._memory.committed.version)
            self._staging.clear()
            self._identity = uuid.uuid4().hex
            old.shut_down()

    # -- what may be asked at any time

    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, stage=self._staging.kind)

    def identity(self) -> str:
        return self._identity

    def inspect(self) -> Inspection:
        self._fault("inspect")
        admission, memory = self._admission, self._memory
        with admission.changed:
            return Inspection(
                paused=admission.closed,
                in_flight=admission.in_flight,
                frozen=admission.frozen_count,
                resident=dict(memory.resident),
                weights_valid=memory.version is not None,
                version=memory.version,
                weights_digest=memory.digest,
                bytes_by_tag=memory.bytes_by_tag(),
                tainted=memory.tainted,
                ranks=memory.ranks(),
            )

    # -- requests

    def generate(self, prompt: Prompt, timeout: float) -> Generation:
        check_prompt(prompt, self.config.vocab_size, self.config.max_position)
        self._fault("generate")
        admission = self._admission
        ticket = admission.enter(prompt.request_id)
        running = Running(self.config, prompt)
        result: Generation | None = None
        try:
            result = self._run(admission, ticket, running, self._clock() + timeout)
            return result
        finally:
            admission.leave(ticket, aborted=result is None or result.finish_reason == "abort")

    def _run(self, admission: Admission, ticket: Ticket, running: Running, until: float) -> Generation:
        while True:
            self._hold_while_frozen(admission, ticket, until)
            if not ticket.aborted:
                self.hook("step", ticket.request_id, None)
            with admission.changed:
                if admission is not self._admission:
                    raise EngineFailed("the engine was lost while the request ran; send it again")
                if ticket.aborted:
                    return running.finish("abort")
                if self._clock() >= until:
                    raise EngineTimeout("the request was aborted: it had not finished in time")
                reason = self._step(running)
                if reason is not None:
                    return running.finish(reason)

    def _step(self, running: Running) -> FinishReason | None:
        cached: Sequence[str] = ()
        if not running.prefilled:
            cached = self._cache.match(running.tokens)
            running.cache_epoch = self._cache.epoch
        reason = running.step(self._memory.committed.version, cached)
        if reason is not None and running.cache_epoch == self._cache.epoch:
            self._cache.store(running.tokens[: len(running.row_versions)], running.row_versions)
        return reason

    def _hold_while_frozen(self, admission: Admission, ticket: Ticket, until: float) -> None:
        with admission.changed:
            while admission.frozen and not ticket.aborted and self._clock() < until:
                ticket.parked = True
                admission.changed.notify_all()
                admission.changed.wait(min(max(until - self._clock(), 0.001), 60.0))
            ticket.parked = False

    def abort_requests(self, ids: Sequence[str] | None) -> list[str]:
        self._begin("abort_requests", "all" if ids is None else ",".join(ids), None)
        return self._admission.abort(ids)

    # -- lifecycle

    def pause(self, mode: PauseMode, deadline: Deadline) -> PauseResult:
        self._begin("pause", mode, deadline)
        return self._admission.pause(mode, deadline)

    def resume(self) -> None:
        self._begin("resume", "", None)
        with self._admission.changed:
            asleep = [str(tag) for tag, held in self._memory.resident.items() if not held]
            if asleep or self._memory.version is None:
                raise EngineFailed(f"resume: {' and '.join(asleep) or 'weights'} not usable; wake or update first")
            self._admission.resume()

    def sleep(self, tag: Tag, level: Level, deadline: Deadline) -> int:
        self._begin("sleep", str(tag), deadline)
        with self._admission.changed:
            self._need_pause("sleep")
            if tag is Tag.KV_CACHE:
                if self._admission.in_flight:
                    raise EngineFailed("sleep: frozen requests need the kv_cache; abort them first")
                self._cache.reset(self._memory.committed.version)
            return self._memory.sleep(tag, level)

    def wakeup(self, tag: Tag, weights: WakeWeights, deadline: Deadline) -> int:
        self._begin("wakeup", str(tag), deadline)
        # Without the lock: hashing a large source must not hold up `inspect`, and nothing runs while a tag sleeps.
        return self._memory.wake(tag, weights, deadline)

    # -- weights

    def stage(
        self,
        version: str,
        source: str | None,
        digest: str | None,
        deadline: Deadline,
        options: Mapping[str, object] | None = None,
    ) -> Staged:
        check_options(options, self.kind)
        self._begin("stage", version, deadline)
        return self._staging.stage(version, source, digest, deadline)

    def commit(self, staged: Staged, cache: CacheMode, deadline: Deadline) -> None:
        self._writing("commit", staged.version, deadline)
        new = self._staging.ready(staged)  # without the lock, as reading may take long
        with self._admission.changed:
            self._need_pause("commit")
            if not self._memory.resident[Tag.WEIGHT]:
                raise EngineFailed("commit: the weights are asleep; wake them first")
            self._staging.drop(staged)
            self._memory.commit(new)
            if cache != "keep":
                self._cache.reset(staged.version)

    def discard(self, staged: Staged) -> None:
        self._begin("discard", staged.version, None)
        self._staging.drop(staged)

    def transfer(self, step: str, version: str | None, info: Mapping[str, object], deadline: Deadline) -> None:
        """With `info` {"rendezvous": folder, "tensors": [names]}, `update` blocks until a trainer has sent them all
        (see `Rendezvous`; the folder must lie under an allowed root). Any other `info` is taken as received."""
        self._writing("transfer", step, deadline)
        with self._admission.changed:
            self._need_pause("transfer")
            self._memory.transfer_step(step)
            if step == "finish":
                self._memory.finish_transfer(version)
        if step == "update":
            self._receive(info, deadline)

    def _receive(self, info: Mapping[str, object], deadline: Deadline) -> None:
        """Without the lock: `inspect` must answer meanwhile."""
        if "rendezvous" not in info:
            return
        names = tensor_names(info)
        meeting = Rendezvous(self._memory.allowed(str(info["rendezvous"])))
        identity = self._identity
        meeting.arrive(identity)
        for number, name in enumerate(names):
            try:
                self.hook("write", name, deadline)
                self._memory.received(name, meeting.receive(name, deadline))
            except Exception as error:
                with self._admission.changed:
                    self._memory.taint()
                raise EngineTainted(
                    f"transfer: cut off after {number} of {len(names)} tensors ({error}); transfer or update again"
                ) from error
            if identity != self._identity:
                raise EngineFailed("transfer: the engine was lost in the middle; start again")

    def reset_cache(self) -> int:
        self._begin("reset_cache", "", None)
        with self._admission.changed:
            return self._cache.reset(self._memory.committed.version)

    def close(self) -> None:
        self._admission.shut_down()

    # -- shared by the methods above

    def _begin(self, method: str, subject: str, deadline: Deadline | None) -> None:
        self.hook(method, subject, deadline)
        self._fault(method)
        if deadline is not None and method != "pause":
            check_deadline(deadline, method)

    def _writing(self, method: str, subject: str, deadline: Deadline) -> None:
        try:
            self._begin(method, subject, deadline)
        except EngineTainted:
            with self._admission.changed:
                self._memory.taint()
            raise

    def _fault(self, method: str) -> None:
        error = self._faults.take(method)
        if error is not None:
            raise error

    def _need_pause(self, method: str) -> None:
        if not self._admission.closed:
            raise EngineFailed(f"{method}: the engine serves requests; pause it first")
