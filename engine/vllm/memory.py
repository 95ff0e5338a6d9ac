"""Sleep and wake of a vLLM server.

Two things are in the way. `/sleep` knows a level and no tags: it releases everything. `/wake_up` resumes scheduling:
older servers after every wake, newer ones once all is resident. So each wake has a pause right behind it, sent while
the wake runs: the engine core takes calls in order and schedules nothing between them. Afterwards the pause is read
back, and asked for again where it does not hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from moebus.engine.http import resolved
from moebus.engine.http.span import Least, Span
from moebus.engine.port import Deadline, EngineFailed, EngineUnknown, Level, Unsupported, WakeWeights
from moebus.engine.vllm.api import READ_S, SLEEP_MODE, VllmApi
from moebus.engine.vllm.state import EMPTY, Now, VllmState
from moebus.engine.vllm.weights import VllmWeights
from moebus.engine.waiting import check_deadline
from moebus.observability.log import get_logger
from moebus.schemas.errors import MoebusError
from moebus.schemas.tags import ALL_TAGS, Tag

HOLD_S = 5.0
_log = get_logger(__name__)


class VllmMemory:
    """Used by the worker's thread."""

    def __init__(self, api: VllmApi, state: VllmState, weights: VllmWeights) -> None:
        self._api = api
        self._state = state
        self._weights = weights
        self._sleeps: tuple[str, bool | None] = ("", None)

    # -- sleep

    def sleep(self, now: Now, tag: Tag, level: Level, deadline: Deadline) -> None:
        """Releases both tags; a tag that sleeps already stays as it is."""
        check_deadline(deadline, "sleep")
        now.need_pause("sleep")
        self.make_sure(now, deadline)
        belief = self._state.known
        if not belief.resident[tag]:
            return
        if belief.frozen:
            raise EngineFailed("sleep: frozen requests need the kv_cache; abort them first")
        self._need_sleep_mode(now.life, deadline)
        for other in belief.asleep:  # the server sleeps whole or not at all
            self._held_wake(other, now.life, deadline)
        if level == "discard":
            self._weights.mark(EMPTY, now.life, deadline)
        self._state.change(now.life, lambda old: replace(old, unsure=frozenset(ALL_TAGS)))
        try:
            resolved(lambda: self._api.sleep(level, deadline), self._slept, self._state.identity, now.life)
        except MoebusError:
            if self._still_awake():
                self._state.change(now.life, lambda old: replace(old, unsure=frozenset()))
                if level == "discard" and now.found.weights_valid:
                    self._weights.unmark(now, deadline)
            raise
        self._state.change(now.life, lambda old: old.slept(level))

    def _slept(self) -> bool | None:
        awake = self._api.gauges().awake
        return None if awake is None else not awake

    def _still_awake(self) -> bool:
        try:
            return self._slept() is False
        except MoebusError:
            return False

    # -- wake

    def wake(self, now: Now, tag: Tag, weights: WakeWeights, deadline: Deadline) -> None:
        """Allocates one tag; for weights, fills them as `weights` says. Never opens admission."""
        check_deadline(deadline, "wakeup")
        now.need_pause("wakeup")
        self.make_sure(now, deadline)
        belief = self._state.known
        found = self._state.look(Span(READ_S)) if now.belief.unsure else now.found
        copied = belief.level == "offload" and belief.weights == "valid"
        load = tag is Tag.WEIGHT and weights == "restore" and not copied and not found.weights_valid
        if load and belief.source is None:
            raise EngineFailed("wakeup: the weights cannot be restored: they came by a transfer, or before this worker")
        if not belief.resident[tag]:
            self._held_wake(tag, now.life, deadline)
            if tag is Tag.WEIGHT and weights == "empty":
                self._weights.mark(EMPTY, now.life, deadline)
        if load:
            self._weights.restore(deadline)

    def make_sure(self, now: Now, deadline: Deadline) -> None:
        """Wakes what may be asleep without this worker knowing: a wake of what is awake does nothing at the server."""
        for tag in ALL_TAGS:
            if tag in now.belief.unsure:
                self._held_wake(tag, now.life, deadline)

    def _held_wake(self, tag: Tag, life: str, deadline: Deadline) -> None:
        """Raises Unsupported, EngineFailed, EngineUnknown; the pause holds all the same, or the error says so."""
        hold = _Hold(lambda: self._api.pause("keep", Least(deadline, HOLD_S)))
        self._state.change(life, lambda old: replace(old, unsure=old.unsure | {tag}))
        try:
            self._api.wake_up(tag, deadline, hold.begin)
        finally:
            hold.end()
            self._hold(tag, deadline)
        self._state.change(life, lambda old: old.with_tag(tag, True))

    def _hold(self, tag: Tag, deadline: Deadline) -> None:
        """Reads the pause back; asks for it again where the server opened."""
        if self._api.is_paused():
            return
        _log.warning("vllm.wake_opened", f"waking {tag} resumed the server; it is paused again")
        self._api.pause("keep", Least(deadline, HOLD_S))
        if not self._api.is_paused():
            raise EngineFailed(f"wakeup: waking {tag} resumed the server, and it cannot be paused again")

    def _need_sleep_mode(self, life: str, deadline: Deadline) -> None:
        """Without the flag `/sleep` answers 200 and frees nothing."""
        if self._sleeps[0] != life:
            try:
                self._sleeps = (life, self._api.sleep_enabled(deadline))
            except EngineUnknown:
                self._sleeps = ("", None)
        if self._sleeps[1] is False:
            raise Unsupported(f"sleep: the server was started without sleep mode; start it with {SLEEP_MODE}")


class _Hold:
    """A pause that is sent from a thread of its own while a wake runs. One that fails is asked for again by `_hold`."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="vllm-hold", daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._pause()
        except MoebusError as error:
            _log.warning("vllm.hold_failed", str(error))
