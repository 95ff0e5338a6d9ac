"""Waiting for SGLang: until nothing runs, the schedulers are through, the cache is gone, or a label is there.

Every proof is read from the server, several times where one look could be chance.
"""

from __future__ import annotations

from collections.abc import Callable

from moebus.engine.port import (
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnreachable,
)
from moebus.engine.sglang.api import Api, Load

LOOKS = 3
"""Looks in a row that must agree: a pause that reached one of several processes shows new requests by then."""
FLUSH_S = 20.0
SETTLE_S = 5.0
_FIRST_S, _LONGEST_S = 0.02, 1.0


class Drain:
    """`rest` waits; it is `time.sleep` but in tests."""

    def __init__(self, api: Api, rest: Callable[[float], None]) -> None:
        self._api = api
        self._rest = rest

    def empty(self, deadline: Deadline) -> Load:
        """Nothing runs and nothing waits, three looks in a row.

        Raises:
            EngineFailed: requests came after the pause.  EngineTimeout.
        """
        quiet, began = 0, False
        while True:
            load = self._look()
            if load is None:
                self._wait(deadline, "the schedulers do not answer")
                continue
            if load.all and began:
                raise EngineFailed(
                    f"pause: {load.all} requests came in behind it: it reached only some of the server's processes; "
                    "start the server with --tokenizer-worker-num 1"
                )
            began = began or not load.all
            quiet = 0 if load.all else quiet + 1
            if quiet == LOOKS:
                return load
            self._wait(deadline, f"{load.running} requests still run, {load.waiting} wait")

    def still(self, deadline: Deadline, *, running: bool) -> Load:
        """Nothing moves, three looks in a row; `running`: requests stay in the running batch. Raises EngineTimeout."""
        last: Load | None = None
        same = 0
        while True:
            load = self._look()
            if load is None:
                self._wait(deadline, "the schedulers do not answer")
                continue
            may = running or not load.running
            same, last = (same + 1 if load == last else 1) if may else 0, load
            if same == LOOKS:
                return load
            self._wait(deadline, f"{load.running} requests still run")

    def _look(self) -> Load | None:
        """None where the schedulers are too busy to answer."""
        try:
            return self._api.load()
        except EngineUnreachable:
            return None

    def flush(self, deadline: Deadline) -> None:
        """Drops the prefix cache; a refusal is tried again, ever more slowly. Raises EngineFailed: to the end."""
        pause = _FIRST_S
        while True:
            try:
                self._api.flush(deadline)
                return
            except EngineUnauthorized:
                raise
            except EngineRefused as error:
                if deadline.remaining() <= pause:
                    raise EngineFailed(f"reset_cache: SGLang refuses while it holds requests: {error}") from error
            self._rest(pause)
            pause = min(2 * pause, _LONGEST_S)

    def through(self, deadline: Deadline) -> None:
        """The schedulers answer: they are through with every call before. Raises EngineTimeout."""
        while not self.answering():
            self._wait(deadline, "the schedulers do not answer yet")

    def reached(self, deadline: Deadline) -> bool:
        """As `through`; False where they do not answer in time."""
        try:
            self.through(deadline)
        except EngineTimeout:
            return False
        return True

    def answering(self) -> bool:
        try:
            self._api.info()
        except EngineUnreachable:
            return False
        return True

    def labelled(self, version: str, deadline: Deadline) -> bool:
        """Whether the server names `version` before the deadline."""
        while True:
            try:
                if self._api.weight_version() == version:
                    return True
            except EngineUnreachable:
                pass
            if deadline.remaining() <= _FIRST_S:
                return False
            self._rest(_FIRST_S)

    def _wait(self, deadline: Deadline, what: str) -> None:
        if deadline.remaining() <= 0:
            raise EngineTimeout(f"the deadline passed: {what}")
        self._rest(min(_FIRST_S, max(deadline.remaining(), 0.0)))
