"""FastDeployEngine: the Engine port over FastDeploy's control API (docs/engines/fastdeploy.md: every mapping and why).

FastDeploy tells whether it is paused. It tells neither what sleeps nor which weights it holds, and nothing that changes
with a restart: every lost connection counts as a lost memory. Its control calls may be made twice, so what is not known
is asked for again. Its wakeup opens admission: this engine closes it again behind it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from pydantic import SecretStr

from moebus.engine.fastdeploy.api import LOOK_S, Api, Config
from moebus.engine.fastdeploy.update import Update
from moebus.engine.fastdeploy.wake import Waking
from moebus.engine.http import Belief, EngineServer, Lives, once_more, one_command, take_back
from moebus.engine.http.known import Known
from moebus.engine.http.lifeline import Lifeline
from moebus.engine.http.notes import Notes, default_home
from moebus.engine.http.span import Span
from moebus.engine.port import (
    CacheMode,
    Capabilities,
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineUnreachable,
    Inspection,
    Level,
    PauseMode,
    PauseResult,
    Staged,
    Unsupported,
    WakeWeights,
)
from moebus.engine.waiting import check_deadline
from moebus.schemas.errors import MoebusError
from moebus.schemas.tags import ALL_TAGS, Tag

_LEVELS: frozenset[Level] = frozenset(("offload", "discard"))
_NOT_ASKED = (EngineUnreachable, EngineRefused, Unsupported)
CALL_S = 60.0
SETTLE_S = 5.0


class FastDeployEngine:
    """A ServerEngine. One server is one data-parallel rank of FastDeploy: each has a worker of its own."""

    kind = "fastdeploy"

    def __init__(self, server: EngineServer, *, notes: Notes | None = None, look_s: float = LOOK_S) -> None:
        """Connects to nothing. `look_s`: what each look of an inspection may take."""
        self._server = server
        self._line = Lifeline(server.url)
        self._watcher = uuid.uuid4().hex[:12]
        self._api = Api(server)
        self._look_s = look_s
        self._known = Known(Lives(server, self._boot), notes or Notes(None, server.url), keeps=_kept)
        self._waking = Waking(self._api)
        self._update = Update(self._api, self._known)
        self._config: Config | None = None
        self._paused = False

    @classmethod
    def connect(
        cls, url: str, *, token: SecretStr | None = None, allowed_roots: Sequence[str] = (), home: Path | None = None
    ) -> FastDeployEngine:
        """`allowed_roots`: of no use, the server has a source of its own. Raises InvalidInput: the URL."""
        server = EngineServer(url, token)
        return cls(server, notes=Notes(home or default_home(), server.url))

    # -- what may be asked at any time

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def trouble(self) -> str | None:
        return self._server.trouble

    def capabilities(self) -> Capabilities:
        """Of a server that does not tell how it was started: of one with every flag."""
        self._config = self._config or self._api.config(self._look_s)
        tags = set(ALL_TAGS) if self._config.dynamic is not False else set()
        if self._config.strategy == "rsync":
            tags.discard(Tag.WEIGHT)  # it can be put to sleep and not be woken
        levels = {Tag.WEIGHT: frozenset[Level](("discard",)), Tag.KV_CACHE: _LEVELS}
        return Capabilities(
            pause_modes=frozenset(("abort",)),
            levels={tag: levels[tag] for tag in tags},
            tags=frozenset(tags),
            stage="none",
            cache_modes=frozenset(("reset",)),
            transfer=False,
            abort=True,
            wakes_whole=True,  # it serves as soon as anything is awake
        )

    def identity(self) -> str:
        return self._known.identity()

    def inspect(self) -> Inspection:
        """How many requests it has FastDeploy tells only in its metrics: 0."""
        belief = self._known.now()
        try:
            self._paused = self._api.is_paused(self._look_s)
        except EngineUnreachable:
            if not self._known.busy:  # it waits behind a call of ours
                raise
        resident = belief.resident[Tag.WEIGHT]
        valid = resident and belief.weights == "valid"
        return Inspection(
            paused=self._paused,
            in_flight=0,
            frozen=0,
            resident=dict(belief.resident),
            weights_valid=valid,
            version=belief.version if valid else None,
            weights_digest=None,
            bytes_by_tag=dict.fromkeys(ALL_TAGS, 0),
            tainted=resident and belief.weights == "mixed",
            ranks=self._update.ranks if valid else (),
        )

    # -- traffic

    @one_command
    def pause(self, mode: PauseMode, deadline: Deadline) -> PauseResult:
        if mode != "abort":
            raise Unsupported(f"pause: FastDeploy has no mode {mode}; use abort")
        belief = self._known.now()
        check_deadline(deadline, "pause")
        foreign = not belief.paused and self._api.is_paused()
        if foreign:  # a pause that failed half way looks the same as one that is done
            self._api.abort(None, deadline)
        try:
            with self._known.calling():
                once_more(lambda: self._api.pause(deadline))
        except _NOT_ASKED:
            raise
        except MoebusError as error:
            self._open_again(belief, error)
        if not self._api.is_paused():
            raise EngineFailed("pause: the server says success and that it is not paused")
        self._known.set(replace(self._known.belief, paused=True))
        return PauseResult(0, 0, 0, idle_confirmed=not foreign)

    def _open_again(self, before: Belief, error: MoebusError) -> NoReturn:
        """A pause that failed has set its flag, and the next one would do nothing: taken back. Raises."""
        if before.paused or before.asleep:
            raise error
        take_back(error, lambda: self._api.resume(Span(SETTLE_S)))

    @one_command
    def resume(self) -> None:
        belief = self._known.now()
        asleep = [str(tag) for tag in belief.asleep]
        if asleep or belief.weights != "valid":
            raise EngineFailed(f"resume: {' and '.join(asleep) or 'weight'} not usable; wake or update first")
        self._known.set(replace(belief, paused=False))
        with self._known.calling():
            once_more(lambda: self._api.resume(Span(CALL_S)))
        if self._api.is_paused():
            raise EngineFailed("resume: the server says success and that it is paused")

    def abort_requests(self, ids: Sequence[str] | None) -> list[str]:
        """Newer servers do not say which requests ran: then ids come back as asked for, and none for all."""
        self._known.now()
        if ids is not None and not all(ids):
            raise EngineRefused("ids: an empty id is no request's")
        if ids is not None and not ids:
            return []
        asked = None if ids is None else list(ids)
        ended = self._api.abort(asked, Span(CALL_S))
        return (asked or []) if ended is None else ended

    @one_command
    def reset_cache(self) -> int:
        """0: a pause has dropped the prefix cache, and nothing ran since. Raises Unsupported: while it serves."""
        if not self._api.is_paused():
            raise Unsupported("reset_cache: FastDeploy drops its prefix cache with every pause; pause it")
        return 0

    # -- memory

    @one_command
    def sleep(self, tag: Tag, level: Level, deadline: Deadline) -> int:
        belief = self._known.now()
        check_deadline(deadline, "sleep")
        if not belief.resident[tag]:
            return 0
        if tag is Tag.WEIGHT and level == "offload":
            raise Unsupported("sleep: FastDeploy drops its weights, it keeps none on the host; use level discard")
        if not self._api.is_paused():
            raise EngineFailed("sleep: the engine serves requests; pause it first")
        # Asleep from here on, whatever comes back: waking a tag that is awake does nothing, serving one asleep breaks.
        self._known.set(replace(belief.with_tag(tag, False), paused=True))
        try:
            with self._known.calling():
                once_more(lambda: self._api.memory("sleep", str(tag), deadline))
        except _NOT_ASKED:
            self._known.set(belief)
            raise
        return 0

    @one_command
    def wakeup(self, tag: Tag, weights: WakeWeights, deadline: Deadline) -> int:
        """`weight` over a sleeping cache wakes both: FastDeploy serves as soon as anything is awake."""
        belief = self._known.now()
        check_deadline(deadline, "wakeup")
        if belief.resident[tag]:
            return 0
        if tag is Tag.WEIGHT and weights == "empty":
            raise Unsupported("wakeup: FastDeploy loads its weights as it wakes them; use weights restore")
        if tag is Tag.KV_CACHE and Tag.WEIGHT in belief.asleep:
            raise Unsupported("wakeup: FastDeploy would serve without weights; wake weight, which wakes both")
        with self._known.calling():
            self._waking.wake(",".join(map(str, belief.asleep)), deadline)
        awake = belief
        for one in belief.asleep:
            awake = awake.with_tag(one, True)
        self._known.set(replace(awake, paused=True))
        return 0

    # -- weights

    def stage(
        self,
        version: str,
        source: str | None,
        digest: str | None,
        deadline: Deadline,
        options: Mapping[str, object] | None = None,
    ) -> Staged:
        return self._update.stage(version, source, digest, deadline, options)

    @one_command
    def commit(self, staged: Staged, cache: CacheMode, deadline: Deadline) -> None:
        self._update.commit(staged, deadline)

    def discard(self, staged: Staged) -> None:
        self._update.open.drop(staged.handle)

    @one_command
    def transfer(self, step: str, version: str | None, info: Mapping[str, object], deadline: Deadline) -> None:
        check_deadline(deadline, f"transfer {step}")
        raise Unsupported("transfer: FastDeploy fetches its weights itself; use update_weights")

    def close(self) -> None:
        self._line.close()
        self._server.close()

    def _boot(self) -> str:
        """FastDeploy says nothing of its start: whatever ended a connection counts as one, and so does a new worker."""
        self._api.greet(self._look_s)
        return f"{self._watcher}-{self._server.losses}-{self._line.losses()}"


def _kept(old: Belief, life: str) -> Belief:
    """A connection was lost, or the worker is new: the server may be another. What was bad counts as bad still."""
    return Belief(life=life, resident=old.resident, weights=old.weights, version=None)
