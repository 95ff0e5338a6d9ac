"""SGLangEngine: the Engine port over SGLang's HTTP API (docs/engines/sglang.md: every mapping and its reason).

SGLang tells neither whether it is paused nor which memory is released, and it ends itself when memory is released under
a request, released twice, or taken back while it is there. So what this engine did is written down (`Notes`) before and
after each such call; where an answer was lost and nothing proves the effect, it refuses to go on until the server has
been restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import SecretStr

from moebus.engine.http import Belief, EngineServer, Lives, once_more, one_command, take_back
from moebus.engine.http.known import Known
from moebus.engine.http.notes import Notes, default_home
from moebus.engine.http.span import Span
from moebus.engine.port import (
    CacheMode,
    Capabilities,
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineUnauthorized,
    EngineUnknown,
    EngineUnreachable,
    Inspection,
    Level,
    PauseMode,
    PauseResult,
    Staged,
    Unsupported,
    WakeWeights,
)
from moebus.engine.sglang.api import LOOK_S, SAVER, Api, Info, Load
from moebus.engine.sglang.drain import FLUSH_S, SETTLE_S, Drain
from moebus.engine.sglang.weights import Weights
from moebus.engine.waiting import check_deadline
from moebus.schemas.errors import MoebusError
from moebus.schemas.tags import ALL_TAGS, Tag

KeepMode = Literal["in_place", "retract"]
_LEVELS: frozenset[Level] = frozenset(("offload", "discard"))
CALL_S = 30.0


class SGLangEngine:
    """A ServerEngine. `keep`: what a pause with mode keep does to running requests (`in_place`: they go on with their
    cache; `retract`: they compute it again, which is what `cache=recompute` needs)."""

    kind = "sglang"

    def __init__(
        self,
        server: EngineServer,
        *,
        allowed_roots: Sequence[str] = (),
        notes: Notes | None = None,
        keep: KeepMode = "in_place",
        rest: Callable[[float], None] = time.sleep,
        look_s: float = LOOK_S,
    ) -> None:
        """Connects to nothing. `look_s`: what each look of an inspection may take."""
        self._server = server
        self._api = Api(server)
        self._look_s = look_s
        lives = Lives(server, lambda: self._read_info(look_s).boot)
        self._known = Known(lives, notes or Notes(None, server.url))
        self._keep: KeepMode = keep
        self._drain = Drain(self._api, rest)
        self._weights = Weights(self._api, self._drain, self._known, allowed_roots, keep == "in_place")
        self._info: Info | None = None
        self._last: tuple[Load, str | None] = (Load(0, 0, 0), None)

    @classmethod
    def connect(
        cls, url: str, *, token: SecretStr | None = None, allowed_roots: Sequence[str] = (), home: Path | None = None
    ) -> SGLangEngine:
        """`home`: where the notes lie. Raises InvalidInput: the URL."""
        server = EngineServer(url, token)
        return cls(server, allowed_roots=allowed_roots, notes=Notes(home or default_home(), server.url))

    # -- what may be asked at any time

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def trouble(self) -> str | None:
        return self._server.trouble

    def capabilities(self) -> Capabilities:
        """Of a server that has not answered yet: of one with every flag."""
        info = self._info
        with suppress(MoebusError):
            info = info or self._read_info(self._look_s)
        saver = info is None or info.memory_saver
        backup = info is None or info.cpu_backup
        weight: frozenset[Level] = _LEVELS if backup else frozenset(("discard",))
        changed: CacheMode = "keep" if self._keep == "in_place" else "recompute"
        return Capabilities(
            pause_modes=frozenset(("abort", "keep")),
            levels={Tag.WEIGHT: weight, Tag.KV_CACHE: _LEVELS} if saver else {},
            tags=frozenset(ALL_TAGS if saver else ()),
            stage="none",
            cache_modes=frozenset(("reset", "keep", changed)),
            transfer=True,
            abort=True,
        )

    def identity(self) -> str:
        return self._known.identity()

    def inspect(self) -> Inspection:
        belief = self._known.now()
        try:
            self._last = (self._api.load(self._look_s), self._api.weight_version(self._look_s))
        except EngineUnreachable:
            if not self._known.busy:  # while a call of ours keeps the scheduler, the last look stands
                raise
        load, label = self._last
        if self._info is not None and self._info.tokenizers > 1:  # each of them has a label of its own
            label = belief.version or label
        resident = belief.resident[Tag.WEIGHT]
        valid = resident and belief.weights == "valid" and belief.sure
        sizes = self._info.sizes if self._info is not None else {}
        return Inspection(
            paused=belief.paused,
            in_flight=load.all,
            frozen=load.all if belief.frozen else 0,
            resident=dict(belief.resident),
            weights_valid=valid,
            version=label if valid else None,
            weights_digest=None,
            bytes_by_tag={tag: sizes.get(tag, 0) if belief.resident[tag] else 0 for tag in ALL_TAGS},
            tainted=resident and belief.weights == "mixed",
        )

    # -- traffic

    @one_command
    def pause(self, mode: PauseMode, deadline: Deadline) -> PauseResult:
        if mode == "wait":
            raise Unsupported("pause: SGLang has no mode that lets requests finish; use abort or keep")
        belief = self._known.now()
        check_deadline(deadline, "pause")
        before = self._api.load()
        several = self._info is None or self._info.tokenizers > 1
        try:
            if mode == "keep":
                once_more(lambda: self._api.pause(self._keep, deadline))
                load = self._drain.still(deadline, running=self._keep == "in_place")
            else:
                once_more(lambda: self._abort_all(belief, several, deadline))
                load = self._drain.empty(deadline)
        except Unsupported:
            raise
        except (EngineUnreachable, EngineUnauthorized):
            raise  # nothing was asked
        except MoebusError as error:
            self._open_again(belief, error)
        frozen = load.all if mode == "keep" else 0
        self._known.set(replace(self._known.belief, paused=True, frozen=frozen))
        # In place SGLang may still be in its last step.
        return PauseResult(before.all if mode == "abort" else 0, 0, frozen, mode == "abort" or self._keep == "retract")

    def _abort_all(self, belief: Belief, several: bool, deadline: Deadline) -> None:
        """SGLang's own abort waits for its requests to leave, which frozen ones never do, and closes only the tokenizer
        process that it reaches. Retracting first stops the schedulers, which there is one of for all processes."""
        if several or belief.frozen:
            self._api.pause("retract", deadline)
            self._api.abort(None, deadline)
        else:
            self._api.pause("abort", deadline)

    def _open_again(self, before: Belief, error: MoebusError) -> NoReturn:
        """A pause in vain: admission opens as it was. Raises."""
        if before.paused:
            raise error
        try:
            take_back(error, lambda: self._api.resume(Span(SETTLE_S)))
        finally:
            self._known.set(replace(before, paused=False, frozen=0))

    @one_command
    def resume(self) -> None:
        belief = self._known.sure("resume")
        asleep = [str(tag) for tag in belief.asleep]
        if asleep or belief.weights != "valid":
            raise EngineFailed(f"resume: {' and '.join(asleep) or 'weight'} not usable; wake or update first")
        try:
            once_more(lambda: self._api.resume(Span(CALL_S)))
        except EngineUnknown:
            self._known.set(replace(belief, paused=False, frozen=0))  # it may serve: the next pause is a real one
            raise
        self._known.set(replace(belief, paused=False, frozen=0))

    def abort_requests(self, ids: Sequence[str] | None) -> list[str]:
        """SGLang does not say which requests it ended: ids come back as asked for where it held any request at all. It
        takes an id for the beginning of ids: `a` ends `a-1` too."""
        self._known.now()
        if ids is not None and not all(ids):
            raise EngineRefused("ids: an empty id is no request's")
        held = self._api.load().all
        for name in [None] if ids is None else ids:
            self._api.abort(name, Span(CALL_S))
        return ["?"] * held if ids is None else list(ids) if held else []

    @one_command
    def reset_cache(self) -> int:
        """How many blocks there were SGLang does not tell: 0. Raises EngineFailed: it refused for 20 s."""
        belief = self._known.now()
        if belief.frozen:
            raise EngineFailed("reset_cache: frozen requests need the cache; resume or abort them first")
        self._drain.flush(Span(FLUSH_S))
        return 0

    # -- memory

    @one_command
    def sleep(self, tag: Tag, level: Level, deadline: Deadline) -> int:
        belief = self._known.sure("sleep")
        check_deadline(deadline, "sleep")
        if not belief.resident[tag]:
            return 0
        info = self._need_saver()
        if tag is Tag.WEIGHT and level == "offload" and not info.cpu_backup:
            raise Unsupported("sleep: weights are kept on the host only with --enable-weights-cpu-backup")
        if not belief.paused:
            raise EngineFailed("sleep: the engine serves requests; pause it first")
        load = self._api.load()
        if load.all:
            raise EngineFailed(f"sleep: {load.all} requests are frozen or waiting in the engine; abort them first")
        kept: Level = "offload" if info.cpu_backup else "discard"
        done = belief.with_tag(tag, False)
        done = replace(done, level=kept) if tag is Tag.WEIGHT else done
        self._risky(lambda: self._api.release(tag, deadline), belief, done, deadline)
        return info.sizes.get(tag, 0)

    @one_command
    def wakeup(self, tag: Tag, weights: WakeWeights, deadline: Deadline) -> int:
        belief = self._known.sure("wakeup")
        check_deadline(deadline, "wakeup")
        fill = tag is Tag.WEIGHT and weights == "restore"
        if belief.resident[tag]:
            if fill and belief.weights == "empty":
                self._weights.refill(deadline)
            return 0
        info = self._need_saver()
        from_host = fill and belief.level == "offload" and belief.weights == "valid"
        if fill and not from_host and belief.source is None:
            raise EngineFailed("wakeup: weights that came by a transfer cannot be restored; wake them empty, transfer")
        awake = belief.with_tag(tag, True)
        if tag is Tag.WEIGHT and not from_host:
            awake = replace(awake, weights="empty")
        self._risky(lambda: self._api.take_back(tag, deadline), belief, awake, deadline)
        if fill and not from_host:
            try:
                self._weights.refill(deadline)
            except MoebusError as error:
                self._risky(lambda: self._api.release(tag, Span(CALL_S)), self._known.belief, belief, deadline)
                raise EngineFailed(f"wakeup: the weights cannot be restored: {error}") from error
        return info.sizes.get(tag, 0)

    def _risky(self, call: Callable[[], None], before: Belief, after: Belief, deadline: Deadline) -> None:
        """A call that ends the server when it is made twice: written down before and after."""
        both = {tag: before.resident[tag] and after.resident[tag] for tag in ALL_TAGS}
        self._known.set(replace(before, resident=both, sure=False))
        try:
            with self._known.calling():
                call()
        except EngineUnknown as error:
            # Late with a whole connection: the call stands in the scheduler's line, and so does this question.
            if not error.late or not self._drain.reached(Span(SETTLE_S)):
                raise
        except MoebusError:
            self._known.set(before)
            raise
        self._known.set(after)
        self._drain.through(deadline)

    # -- weights

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
        self._weights.commit(staged, cache, deadline)

    def discard(self, staged: Staged) -> None:
        self._weights.open.drop(staged.handle)

    @one_command
    def transfer(self, step: str, version: str | None, info: Mapping[str, object], deadline: Deadline) -> None:
        self._weights.transfer(step, version, info, deadline)

    def close(self) -> None:
        self._server.close()

    # -- shared by the methods above

    def _read_info(self, within: float = SETTLE_S) -> Info:
        self._info = self._api.info(within)
        return self._info

    def _need_saver(self) -> Info:
        info = self._info or self._read_info()
        if not info.memory_saver:
            raise Unsupported(f"sleep: the server was started without {SAVER}")
        return info
