"""The thread of one mirror: makes the target hold what the index says, one id after the other.

It never acts on what an event said, only on what the index says when its turn comes: so no late put brings back what
was deleted, and whatever was missed (an outage, a full inbox, a restart) is caught up by looking at everything again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

from moebus.consumers.store.mirrors.inbox import Inbox
from moebus.consumers.store.mirrors.ledger import Held, Ledger
from moebus.consumers.store.mirrors.port import MirrorDown, Occupied, Shelf, Target
from moebus.consumers.store.mirrors.source import Wanted
from moebus.consumers.store.mirrors.strikes import Strikes
from moebus.consumers.store.state import AttemptState
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.observability.settings import MirrorSettings
from moebus.schemas.errors import InvalidInput
from moebus.schemas.route_errors import RouteError, StoreCatchingUp

_log = get_logger(__name__)
_WAIT = 0.2
_LONGEST = 30.0
_DELETES = 256
_LIFE_EVERY = 1.0
_PEEK = 1000


class Mirror:
    """`run` is the thread; `inbox` is for the others."""

    def __init__(
        self,
        target: Target,
        ledger: Ledger,
        wanted: Wanted,
        settings: MirrorSettings,
        metrics: Metrics,
        stopping: threading.Event,
        clock: Clock | None = None,
    ) -> None:
        self.inbox = Inbox(settings.queue_bytes)
        self.down: str | None = None
        self._target = target
        self._ledger = ledger
        self._wanted = wanted
        self._settings = settings
        self._metrics = metrics
        self._stopping = stopping
        self._clock = clock or SystemClock()
        self._life: str | None = None
        self._asked = float("-inf")
        self._scan: Iterator[str] = iter(())
        self._doomed: dict[str, Held] = {}
        self._at_once = _DELETES
        self._full = False
        self._refused = False
        self._strikes = Strikes()
        self._patience = _WAIT

    def run(self) -> None:
        """Until told to stop; what is not mirrored then is by the next start."""
        try:
            while not self._stopping.is_set():
                try:
                    self.step()
                except Exception as error:  # the store must not suffer from its mirror
                    _log.error("mirror.failed", f"{self._target.where}: {type(error).__name__}: {error}", exc=error)
                    self.inbox.look_again()
                    self._fail(MirrorDown(f"{type(error).__name__}: {error}"))
        finally:
            self._target.close()
            self._ledger.close()

    def step(self) -> None:
        """One id, or a short wait."""
        if self.inbox.take_again():
            self._scan = self._everything()
        one: str | None = None
        try:
            self._check_life()
            if self.down is not None:
                self._make_room()
            one = self.inbox.take(0) or next(self._scan, None)
            if one is None:
                self._flush()
                self._well()  # all is as it should be
                one = self.inbox.take(_WAIT)
            if one is not None:
                self._settle(one)
        except StoreCatchingUp:
            self._missed(one)
            self._stopping.wait(_WAIT)
        except MirrorDown as error:
            if one is None or not (self._strikes.is_aside(one) or self._strike(one, error)):
                self._missed(one)
            self._fail(error)
        self._metrics.set("moebus_mirror_waiting", len(self.inbox), mirror=self._target.kind)
        self._metrics.set("moebus_mirror_held", self._ledger.count, mirror=self._target.kind)

    def changed(self, ids: list[str]) -> None:
        """From the thread that takes records in."""
        dropped = self.inbox.add(ids)
        if dropped:
            self._metrics.inc("moebus_mirror_dropped_total", dropped, mirror=self._target.kind)

    def _everything(self) -> Iterator[str]:
        """First what is held, since it may have to go; then what may be missing."""
        for held in self._ledger.all():
            if held.attempt and not self._target.has(held.shelf):
                self._ledger.put(replace(held, attempt=b""))
            yield held.shelf.rollout_id
        yield from self._wanted.ids()

    def _check_life(self) -> None:
        """Now and then: a target that was started again holds nothing, though no call ever failed."""
        if self._clock.monotonic() - self._asked < _LIFE_EVERY:
            return
        life = self._target.life()
        self._asked = self._clock.monotonic()
        self.changed(self._strikes.due(self._asked))
        if self._life not in (None, life):
            _log.warning("mirror.new_life", f"{self._target.where} was started again: what it holds is looked at")
            self.inbox.look_again()
        self._life = life

    def _make_room(self) -> None:
        """What has to go does not queue behind puts that fail: the target may be full."""
        for rollout_id in self.inbox.peek(_PEEK):
            held = self._ledger.get(rollout_id)
            if held is None or self._wanted.find(rollout_id) is not None:
                continue
            try:
                self._delete(held)
            except MirrorDown:
                self.inbox.defer(rollout_id)
                return

    def _settle(self, rollout_id: str) -> None:
        held = self._ledger.get(rollout_id)
        found = self._wanted.find(rollout_id)
        if found is None:
            if held is not None:
                self._doomed[rollout_id] = held
            if len(self._doomed) >= self._at_once:
                self._flush()
            return
        self._flush()
        number, state = found
        if held is not None and held.attempt == state.header.attempt and held.shelf == self._shelf(state):
            return
        reason = self._target.refuses(rollout_id, self._settings.layout)
        if state.shape is None:
            reason = "it has no row"
        if reason is None:
            self._put(number, state, held)
        else:
            self._refuse(state, reason, held)

    def _put(self, number: int, state: AttemptState, held: Held | None) -> None:
        settings = self._settings
        try:
            fused = self._wanted.fused(number, state, settings.max_model_len or 0, settings.shared_experts)
        except InvalidInput as error:
            self._refuse(state, str(error), held)
            return
        except StoreCatchingUp:
            raise
        except RouteError as error:  # deleted in the meantime, or damaged: both come again
            self._count("put", "failed")
            _log.debug("mirror.unreadable", f"{state.key}: {error}")
            return
        shelf = self._shelf(state)
        size = fused.nbytes * (2 if settings.layout == "both" else 1)
        if self._target.forgets and self._ledger.bytes - (held.bytes if held else 0) + size > settings.max_bytes:
            self._no_room(state)
            return
        if held is not None and held.shelf != shelf:
            self._delete(held)
        self._ledger.put(Held(shelf, b"", size))
        try:
            self._target.put(shelf, fused)
        except Occupied as error:
            self._ledger.drop(shelf.rollout_id)
            self._refuse(state, str(error), None)
            return
        self._ledger.put(Held(shelf, state.header.attempt, size))
        self._count("put", "ok")
        self._strikes.well(shelf.rollout_id)
        self._well()
        self._metrics.inc("moebus_mirror_bytes_total", size, mirror=self._target.kind)

    def _delete(self, held: Held) -> None:
        self._doomed[held.shelf.rollout_id] = held
        self._flush()

    def _flush(self) -> None:
        """Deletes what was put together."""
        doomed, self._doomed = self._doomed, {}
        if not doomed:
            return
        try:
            self._target.delete([held.shelf for held in doomed.values()])
        except MirrorDown as error:
            if self._at_once > 1 or not self._strike(next(iter(doomed)), error):
                self.changed(list(doomed))
            self._at_once = 1  # one of them may be the trouble
            raise
        self._at_once = min(self._at_once * 2, _DELETES)
        for rollout_id in doomed:
            self._ledger.drop(rollout_id)
            self._strikes.well(rollout_id)
        self._count("delete", "ok", len(doomed))
        self._well()
        if self._full:
            self._full = False
            self.inbox.look_again()

    def _refuse(self, state: AttemptState, reason: str, held: Held | None) -> None:
        if held is not None:
            self._delete(held)
        self._count("put", "refused")
        say = _log.debug if self._refused else _log.warning
        say("mirror.refused", f"{self._target.where} cannot hold {state.key}: {reason}")
        self._refused = True

    def _no_room(self, state: AttemptState) -> None:
        self._count("put", "full")
        if not self._full:
            _log.warning("mirror.full", f"{self._target.where} is full at {state.key}; deletes make room")
        self._full = True

    def _shelf(self, state: AttemptState) -> Shelf:
        layers = len(state.shape.layers) if state.shape else 0
        return Shelf(state.key.rollout_id, layers, self._settings.layout)

    def _missed(self, one: str | None) -> None:
        """Its turn comes again; where it was the scan that failed, that begins again."""
        if one is not None:
            self.changed([one])
        else:
            self.inbox.look_again()

    def _strike(self, one: str, error: MirrorDown) -> bool:
        """Whether it is put aside, since it fails where others do not."""
        aside = self._strikes.failed(one, self._clock.monotonic())
        if aside:
            _log.warning("mirror.aside", f"{one!r} failed again and again, it is tried again later: {error}")
        return aside

    def _well(self) -> None:
        self._patience = _WAIT
        if self.down is not None:
            self.down = None
            _log.info("mirror.resumed", f"{self._target.where} works again")
        self._metrics.set("moebus_mirror_up", 1, mirror=self._target.kind)

    def _fail(self, error: MirrorDown) -> None:
        if self.down is None:
            _log.error("mirror.down", f"{error}; the store goes on, the mirror catches up")
        self.down = str(error)
        self._count("put", "failed")
        self._metrics.set("moebus_mirror_up", 0, mirror=self._target.kind)
        self._stopping.wait(self._patience)
        self._patience = min(self._patience * 2, _LONGEST)

    def _count(self, operation: str, outcome: str, count: int = 1) -> None:
        kind = self._target.kind
        self._metrics.inc("moebus_mirror_operations_total", count, mirror=kind, operation=operation, outcome=outcome)
