"""VllmEngine: the Engine port over a `vllm serve` beside its worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import SecretStr

from moebus.engine.http import EngineServer, one_command, resolved, undo_late
from moebus.engine.http.notes import Notes, default_home
from moebus.engine.http.span import Least, Span
from moebus.engine.port import (
    CacheMode,
    Capabilities,
    Deadline,
    EngineFailed,
    EngineUnknown,
    Inspection,
    Level,
    PauseMode,
    PauseResult,
    Staged,
    WakeWeights,
)
from moebus.engine.vllm.api import READ_S, VllmApi
from moebus.engine.vllm.memory import VllmMemory
from moebus.engine.vllm.state import LOOKS_S, Now, VllmState
from moebus.engine.vllm.transfer import VllmTransfer
from moebus.engine.vllm.weights import VllmWeights
from moebus.schemas.tags import ALL_TAGS, Tag

_LEVELS: frozenset[Level] = frozenset(("offload", "discard"))
CAPABILITIES = Capabilities(
    pause_modes=frozenset(("abort", "wait", "keep")),
    levels=dict.fromkeys(ALL_TAGS, _LEVELS),
    tags=frozenset(ALL_TAGS),
    stage="none",
    cache_modes=frozenset(("reset", "keep", "recompute")),
    transfer=True,
    abort=True,
    sleeps_whole=True,
)
SHORT_S = 30.0
"""What calls without a deadline may take: resume, reset of the cache, abort."""
TIDY_S = 5.0


class VllmEngine:
    """A ServerEngine. Mapping, launch flags and what is not supported: docs/engines/vllm.md."""

    kind = "vllm"

    def __init__(
        self, server: EngineServer, notes: Notes, allowed_roots: Sequence[str] = (), *, look_s: float = LOOKS_S
    ) -> None:
        """`look_s`: what `identity` and `inspect` may take."""
        self._server = server
        self._api = VllmApi(server)
        self._state = VllmState(server, self._api, notes, look_s)
        self._weights = VllmWeights(self._api, self._state, tuple(allowed_roots))
        self._memory = VllmMemory(self._api, self._state, self._weights)
        self._transfer = VllmTransfer(self._api, self._state, self._weights)

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        token: SecretStr | None = None,
        allowed_roots: Sequence[str] = (),
        home: Path | None = None,
    ) -> VllmEngine:
        """Connects at the first call. `allowed_roots`: where weights may be read from; the server must see the same
        files. `home`: where the notes lie (default: as `default_home`). Raises InvalidInput: the URL."""
        server = EngineServer(url, token)
        return cls(server, Notes(home or default_home(), server.url), allowed_roots)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def trouble(self) -> str | None:
        return None if self._state.busy else self._server.trouble

    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def identity(self) -> str:
        return self._state.identity()

    def inspect(self) -> Inspection:
        return self._state.inspect()

    # -- traffic

    @one_command
    def pause(self, mode: PauseMode, deadline: Deadline) -> PauseResult:
        """The counts come from the server's gauges before the call; it does not say that the device is idle."""
        with self._state.calling() as now:
            return self._pause(now, mode, deadline)

    def _pause(self, now: Now, mode: PauseMode, deadline: Deadline) -> PauseResult:
        inside = now.found.in_flight
        try:
            resolved(
                lambda: self._api.pause(mode, deadline),
                lambda: self._drained(mode),
                self._state.identity,
                now.life,
                late_proof=False,
            )
        except EngineUnknown as error:
            if not error.late:
                raise
            tidy = Least(deadline, TIDY_S)
            undo = (lambda: self._api.pause("keep", tidy)) if now.found.paused else (lambda: self._api.resume(tidy))
            raise undo_late(error, undo, f"pause ({mode})") from error
        if not self._api.is_paused():
            raise EngineFailed("pause: the server said that it is done and is not paused")
        frozen = inside if mode == "keep" else 0
        self._state.change(now.life, lambda old: replace(old, frozen=frozen))
        return PauseResult(
            aborted=inside if mode == "abort" else 0,
            finished=inside if mode == "wait" else 0,
            frozen=frozen,
            idle_confirmed=False,
        )

    def _drained(self, mode: PauseMode) -> bool | None:
        """After a cut connection. A pause that waits is said to be one from its beginning."""
        if not self._api.is_paused():
            return False
        running = self._api.gauges().running
        return True if mode != "wait" else None if running is None else running == 0 or None

    def _opened(self) -> bool:
        return not self._api.is_paused()

    @one_command
    def resume(self) -> None:
        """Raises EngineFailed: a tag sleeps, or the weights hold no version."""
        with self._state.calling() as now:
            self._resume(now, Span(SHORT_S))

    def _resume(self, now: Now, deadline: Deadline) -> None:
        self._memory.make_sure(now, deadline)
        found = self._state.look(Span(READ_S)) if now.belief.unsure else now.found
        missing = [str(tag) for tag in ALL_TAGS if not found.resident[tag]]
        if missing or not found.weights_valid:
            raise EngineFailed(f"resume: {' and '.join(missing) or 'weights'} not usable; wake or update first")
        resolved(lambda: self._api.resume(deadline), self._opened, self._state.identity, now.life)
        if not self._opened():
            raise EngineFailed("resume: the server said that it is done and is still paused")
        self._state.change(now.life, lambda old: replace(old, frozen=0))

    def abort_requests(self, ids: Sequence[str] | None) -> list[str]:
        """The server tells a count alone: of ids that were sent it names none as unknown."""
        if ids is not None and not ids:
            return []
        count = self._api.abort(ids, Span(SHORT_S))
        return ["?"] * count if ids is None else list(dict.fromkeys(ids))

    @one_command
    def reset_cache(self) -> int:
        with self._state.calling():
            self._api.reset_cache(Span(SHORT_S))
        return 0

    # -- memory and weights

    @one_command
    def sleep(self, tag: Tag, level: Level, deadline: Deadline) -> int:
        with self._state.calling() as now:
            self._memory.sleep(now, tag, level, deadline)
        return 0

    @one_command
    def wakeup(self, tag: Tag, weights: WakeWeights, deadline: Deadline) -> int:
        with self._state.calling() as now:
            self._memory.wake(now, tag, weights, deadline)
        return 0

    def stage(
        self,
        version: str,
        source: str | None,
        digest: str | None,
        deadline: Deadline,
        options: Mapping[str, object] | None = None,
    ) -> Staged:
        return self._weights.stage(version, source, digest, deadline, options)

    @one_command
    def commit(self, staged: Staged, cache: CacheMode, deadline: Deadline) -> None:
        with self._state.calling() as now:
            self._memory.make_sure(now, deadline)
            self._weights.commit(now, staged, cache, deadline)

    def discard(self, staged: Staged) -> None:
        self._weights.discard(staged)

    @one_command
    def transfer(self, step: str, version: str | None, info: Mapping[str, object], deadline: Deadline) -> None:
        with self._state.calling() as now:
            self._memory.make_sure(now, deadline)
            self._transfer.step(now, step, version, info, deadline)

    def close(self) -> None:
        """The server goes on."""
        self._server.close()
