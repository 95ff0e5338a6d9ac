"""vLLM's engine core as its public documentation and sources describe it: one loop that takes calls in order and steps
the scheduler between them. Memory that a step touches while it is released is an accident, which ends a real server."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moebus.engine.simulated.rendezvous import Rendezvous
from tests.support.deadlines import Left

TAGS = ("weights", "kv_cache")
OWN_MODEL = "org/model"
OPEN, NO_NEW, NOTHING = "open", "no new", "nothing"


@dataclass
class Request:
    name: str
    tokens: int
    done: Future[dict[str, Any]] = field(default_factory=Future)
    made: int = 0


@dataclass
class Bugs:
    """Switches of what servers were reported to do (numbers of docs/engines/vllm.md)."""

    partial_wake_serves: bool = True  # of older servers; newer ones wait until all is awake
    wake_skips_mixed: bool = True  # one tag that is awake makes the whole call do nothing
    pause_never_returns: bool = False
    no_sleep_mode: bool = False
    no_labels: bool = False
    several_api_servers: bool = False
    no_stats: bool = False
    wake_seconds: float = 0.02
    reload_fails: bool = False


def _settle(future: Future[Any], result: object) -> None:
    """A call that waits for something gives a future of its own."""
    if isinstance(result, Future):
        result.add_done_callback(lambda done: future.set_result(done.result()))
    else:
        future.set_result(result)


class Core:
    """Thread-safe by its queue: `call` runs on the loop's thread."""

    def __init__(self, weights: str, bugs: Bugs) -> None:
        self.bugs = bugs
        self.weights: str | None = weights
        self.own_weights = weights
        self.model = OWN_MODEL
        self.version = "default"
        self.pause_state = OPEN
        self.asleep: set[str] = set()
        self.backup: str | None = None
        self.level = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.shown = (0, 0)
        self.accidents: list[str] = []
        self.cache: set[str] = set()
        self.updating = False
        self.initialised: dict[str, Any] | None = None
        self._draining: list[Future[None]] = []
        self._calls: queue.Queue[tuple[Future[Any], Callable[[], Any]] | None] = queue.Queue()
        threading.Thread(target=self._loop, daemon=True).start()

    def call(self, what: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, what))
        return future

    @property
    def paused(self) -> bool:
        return self.pause_state != OPEN

    def stop(self) -> None:
        self._calls.put(None)

    # -- the loop

    def _loop(self) -> None:
        while True:
            busy = self.pause_state == OPEN and bool(self.waiting or self.running)
            busy = busy or (self.pause_state == NO_NEW and bool(self.running))
            try:
                item = self._calls.get(timeout=0.001 if busy else 60.0)
            except queue.Empty:
                self._step()
                continue
            if item is None:
                return
            future, what = item
            try:
                result = what()
            except Exception as error:
                future.set_exception(error)
            else:
                _settle(future, result)

    def _step(self) -> None:
        if self.pause_state == OPEN:
            self.running, self.waiting = self.running + self.waiting, []
        if self.asleep:
            self.accidents.append(f"a step while {', '.join(sorted(self.asleep))} was released")
        if self.weights is None:
            self.accidents.append("a step with weights that hold nothing")
        for one in list(self.running):
            one.made += 1
            self.cache.add(one.name)
            if one.made >= one.tokens:
                self._end(one, "length")
        self.shown = (len(self.running), len(self.waiting))
        self._drained()

    def _end(self, one: Request, reason: str) -> None:
        if one in self.running:
            self.running.remove(one)
        if one in self.waiting:
            self.waiting.remove(one)
        one.done.set_result({"finish_reason": reason, "tokens": one.made, "weights": self.weights})

    def _drained(self) -> None:
        if not self.running:
            waiters, self._draining = self._draining, []
            for waiter in waiters:
                waiter.set_result(None)

    # -- calls

    def add(self, one: Request) -> None:
        self.waiting.append(one)

    def pause(self, mode: str, clear: bool) -> Future[None] | None:
        if mode == "abort":
            self.abort(None)
        self.pause_state = NOTHING if mode == "keep" else NO_NEW
        if clear and mode != "keep":
            self.cache.clear()
        if self.bugs.pause_never_returns:
            return Future()
        if mode == "wait" and self.running:
            self._draining.append(Future())
            return self._draining[-1]
        return None

    def resume(self) -> None:
        self.pause_state = OPEN

    def abort(self, names: list[str] | None) -> int:
        hit = [one for one in [*self.running, *self.waiting] if names is None or one.name in names]
        for one in hit:
            self._end(one, "abort")
        return len(hit) if names is None else len(names)

    def sleep(self, level: int, mode: str) -> Future[None] | None:
        self.pause(mode, level >= 1)
        if level < 1 or self.bugs.no_sleep_mode or self.asleep:
            return None
        self.asleep, self.level = set(TAGS), level
        self.backup = self.weights if level == 1 else None
        self.weights = None
        return None

    def wake(self, tags: list[str] | None) -> None:
        time.sleep(self.bugs.wake_seconds)  # the loop is busy with it, as a real one is
        self._wake(TAGS if tags is None else tuple(tags))
        if not self.asleep or self.bugs.partial_wake_serves:
            self.resume()

    def _wake(self, tags: tuple[str, ...]) -> None:
        known = [tag for tag in tags if tag in self.asleep]
        if not self.asleep or (len(known) != len(tags) and self.bugs.wake_skips_mixed):
            return
        if "weights" in known:
            self.weights = self.backup
        self.asleep -= set(known)

    def reload(self, path: str | None) -> None:
        if self.bugs.reload_fails or self.asleep & {"weights"}:
            self.weights = "a mixture"
            raise RuntimeError("a tensor has another shape")
        self.model = path or self.model  # a server goes on with the last path it was given
        own = self.model == OWN_MODEL
        self.weights = self.own_weights if own else Path(self.model, "model.safetensors").read_text()

    def reset_cache(self, running_too: bool) -> bool:
        if self.running and not running_too:
            return False
        self.cache.clear()
        return True

    # -- weight transfer

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._meet(info, "init")
        self.initialised = info

    def start_update(self) -> None:
        if self.updating:
            raise RuntimeError("start_weight_update called while already active")
        self.updating = True

    def update(self, info: dict[str, Any]) -> None:
        if not self.updating:
            raise RuntimeError("update_weights called without start_weight_update")
        self.weights = "a mixture"
        self._meet(info, "update")
        self.weights = str(info.get("weights", "transferred"))

    def finish_update(self, version: str | None) -> None:
        if not self.updating:
            raise RuntimeError("finish_weight_update called without start_weight_update")
        self.updating = False
        if version is not None:
            self.version = version

    def _meet(self, info: dict[str, Any], what: str) -> None:
        """A collective: it ends when everybody is there."""
        if "rendezvous" not in info:
            return
        meeting = Rendezvous(Path(info["rendezvous"]))
        meeting.arrive(f"{what}-{id(self)}")
        for name in info.get("tensors", [what]):
            meeting.receive(name, Left(float(info.get("seconds", 30.0))))
