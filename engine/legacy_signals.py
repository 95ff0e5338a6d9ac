"""FastDeploy's legacy signals: one int32 each in POSIX shared memory, for processes of one host.

`model_weights_status.<suffix>`, `kv_cache_status.<suffix>` and `prefix_tree_status.<suffix>` hold a `Status`. Whoever
holds the memory runs a `Holder`; whoever asks for it to be cleared or loaded again uses `LegacySignals`. Every change
is a compare-and-swap under a file lock, so that no write is lost to one that was begun earlier; who holds a signal is
known by a lock that the kernel drops with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from moebus.observability.clock import Clock, SystemClock
from moebus.observability.log import get_logger
from moebus.schemas.errors import FatalError, InvalidInput

SHM = Path("/dev/shm")
WEIGHTS, KV_CACHE, PREFIX_TREE = "model_weights_status", "kv_cache_status", "prefix_tree_status"
TIMEOUT_SECONDS = 300.0
_POLL_SECONDS = 0.01
_ATTEMPTS = 3
"""How often a signal that fell back is asked again: a write of another process may have undone the first."""
_CLAIM_ATTEMPTS = 20
_BYTES = 4
_log = get_logger(__name__)


class Status(IntEnum):
    """FastDeploy's values."""

    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


class SignalError(FatalError):
    """A signal is not there, held by another process, or of another shape; the text names it."""


@dataclass(frozen=True, slots=True)
class LegacyAnswer:
    """`status` and `msg` as FastDeploy answers over HTTP; `detail`: which signal stands where, empty when well."""

    status: int
    msg: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Way:
    """Clearing or updating, with FastDeploy's words for it."""

    start: Status
    asked: Status
    done: Status
    other: Status
    verb: str
    there: str
    already: str
    refused: str


_CLEAR = _Way(
    Status.NORMAL, Status.CLEARING, Status.CLEARED, Status.UPDATING, "clear", "model weight is cleared",
    "worker is clearing model weight already", "worker is updating model weight, cannot clear now",
)  # fmt: skip
_UPDATE = _Way(
    Status.CLEARED, Status.UPDATING, Status.NORMAL, Status.CLEARING, "update", "model weight is updated",
    "worker is updating model weight already", "worker is clearing model weight, cannot update now",
)  # fmt: skip


class Signal:
    """One signal. Thread-safe; `close` it."""

    def __init__(self, name: str, suffix: str, *, create: bool = False, root: Path = SHM) -> None:
        """Raises SignalError: not there (without `create`), or not an int32."""
        self.name = f"{name}.{check_suffix(suffix)}"
        self._lock = threading.Lock()
        try:
            self._fd = os.open(root / self.name, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        except OSError as error:
            raise SignalError(f"signal {self.name} is not on this host ({error.strerror})") from error
        try:
            with self._exclusive():
                if create and os.fstat(self._fd).st_size < _BYTES:
                    os.ftruncate(self._fd, _BYTES)
            if os.fstat(self._fd).st_size < _BYTES:
                raise SignalError(f"signal {self.name} holds no 32-bit number; remove {root / self.name}")
            self._map = mmap.mmap(self._fd, _BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        self._view = memoryview(self._map).cast("i")

    @property
    def value(self) -> Status:
        """Raises SignalError: not one of FastDeploy's values."""
        number = self._view[0]
        try:
            return Status(number)
        except ValueError:
            raise SignalError(f"signal {self.name} is {number}, which means nothing") from None

    def swap(self, expected: Status, new: Status) -> bool:
        """Writes `new` where the signal is `expected`; whether it did."""
        with self._exclusive():
            if self._view[0] != expected:
                return False
            self._view[0] = int(new)
            return True

    def put(self, new: Status) -> None:
        """Writes `new` whatever is there: only for a holder that has just begun."""
        with self._exclusive():
            self._view[0] = int(new)

    def close(self) -> None:
        self._view.release()
        self._map.close()
        os.close(self._fd)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


class Holder:
    """The one process whose memory a signal speaks of. Call `step` in its loop; a context manager.

    `effect(UPDATING | CLEARING)` loads or frees the memory; where it raises, the signal goes back and the next request
    tries again. `passes_on`: a signal that is asked for the same before the effect, as FastDeploy's workers ask for the
    KV cache. What a crashed process left in the signal is overwritten by `status`, which is how this process begins.
    """

    def __init__(
        self,
        name: str,
        suffix: str,
        effect: Callable[[Status], object],
        *,
        status: Status = Status.NORMAL,
        passes_on: str | None = None,
        root: Path = SHM,
    ) -> None:
        """Raises SignalError: another process holds it."""
        self._effect = effect
        self._suffix = suffix
        self._passes_on = passes_on
        self._root = root
        self._claim = os.open(root / _claim_name(name, check_suffix(suffix)), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _claimed(self._claim):
                raise SignalError(f"signal {name}.{suffix} is held by another process of this host")
            self.signal = Signal(name, suffix, create=True, root=root)
            self.signal.put(status)
        except BaseException:
            os.close(self._claim)
            raise

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> bool:
        """Carries out what is asked for, if anything is; whether it was. Never waits for another process."""
        asked = self.signal.value
        way = {Status.UPDATING: _UPDATE, Status.CLEARING: _CLEAR}.get(asked)
        if way is None:
            return False
        try:
            self._ask_next(way)
            self._effect(asked)
        except Exception as error:
            _log.error("legacy.failed", f"{self.signal.name}: {error}", exc=error, asked=asked.name)
            self.signal.swap(asked, way.start)
            return True
        # Only from what was asked: a request that came meanwhile stands.
        self.signal.swap(asked, way.done)
        return True

    def close(self) -> None:
        """Gives the signal up; it stays as it is."""
        self.signal.close()
        os.close(self._claim)

    def _ask_next(self, way: _Way) -> None:
        if self._passes_on is not None:
            with contextlib.suppress(SignalError):  # FastDeploy runs without a cache process too
                follower = Signal(self._passes_on, self._suffix, root=self._root)
                follower.swap(way.start, way.asked)
                follower.close()


class LegacySignals:
    """The side of the API server: asks for memory to be cleared or loaded again, and waits. Thread-safe."""

    def __init__(
        self,
        suffix: str,
        *,
        root: Path = SHM,
        clock: Clock | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`suffix`: the port of the engine's worker queue. Raises InvalidInput, field `suffix`."""
        self.suffix = check_suffix(suffix)
        self._root = root
        self._clock = clock or SystemClock()
        self._pause = pause

    def clear(self, timeout: float = TIMEOUT_SECONDS) -> LegacyAnswer:
        """Frees prefix tree, weights and KV cache; `timeout` in seconds for all of it. Raises nothing."""
        return self._go(_CLEAR, timeout)

    def update(self, timeout: float = TIMEOUT_SECONDS) -> LegacyAnswer:
        """Loads them again. Raises nothing."""
        return self._go(_UPDATE, timeout)

    def serving(self) -> bool:
        """Whether requests may be taken: every signal that is there is NORMAL, and the weights' one is there."""
        try:
            with self._signals() as signals:
                return all(signal.value is Status.NORMAL for signal in signals.values())
        except SignalError:
            return False

    def _go(self, way: _Way, timeout: float) -> LegacyAnswer:
        deadline = self._clock.monotonic() + timeout
        try:
            with self._signals() as signals:
                at_once = self._at_once(way, signals)
                if at_once is not None:
                    return at_once
                with self._alone(deadline) as alone:
                    if not alone:
                        return LegacyAnswer(
                            404, f"{way.verb} model weight timeout", "another process asks at this time"
                        )
                    return self._at_once(way, signals) or self._drive(way, signals, deadline)
        except SignalError as error:
            return LegacyAnswer(404, str(error), str(error))

    def _at_once(self, way: _Way, signals: dict[str, Signal]) -> LegacyAnswer | None:
        """The answer where nothing is to be done or may be done."""
        values = {name: signal.value for name, signal in signals.items()}
        if all(value is way.done for value in values.values()):
            return LegacyAnswer(200, way.there)
        for name, value in values.items():
            if value in (way.asked, way.other) and self._abandoned(name):
                return _abandoned_answer(signals[name])
        if values[WEIGHTS] is way.asked:
            return LegacyAnswer(400, way.already)
        return LegacyAnswer(403, way.refused) if values[WEIGHTS] is way.other else None

    def _drive(self, way: _Way, signals: dict[str, Signal], deadline: float) -> LegacyAnswer:
        """One signal after the other. The KV cache is asked for by the holder of the weights; here only where that
        had been asked already."""
        for name in (PREFIX_TREE, WEIGHTS, KV_CACHE):
            if name in signals:
                stopped = self._bring(way, name, signals[name], deadline)
                if stopped is not None:
                    return stopped
        return LegacyAnswer(200, f"{way.verb} model weight successfully")

    def _bring(self, way: _Way, name: str, signal: Signal, deadline: float) -> LegacyAnswer | None:
        """None once the signal is where it should be."""
        what = "prefix tree" if name == PREFIX_TREE else "model weight"
        asked = 0
        while True:
            value = signal.value
            if value is way.done:
                return None
            if value is way.start:
                if asked == _ATTEMPTS:
                    return LegacyAnswer(404, f"{way.verb} {what} failed", f"{_text(signal)} after {asked} requests")
                asked += signal.swap(way.start, way.asked)
            elif self._abandoned(name):
                return _abandoned_answer(signal)
            if self._clock.monotonic() >= deadline:
                return LegacyAnswer(404, f"{way.verb} {what} timeout", _text(signal))
            self._pause(_POLL_SECONDS)

    def _abandoned(self, name: str) -> bool:
        """Whether the holder has ended. Holders that are not ours leave no trace of themselves: False."""
        try:
            claim = os.open(self._root / _claim_name(name, self.suffix), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return _try_lock(claim, shared=True)  # shared: those who look do not take each other for the holder
        finally:
            os.close(claim)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[dict[str, Signal]]:
        """Those that are there; the weights' one must be. Raises SignalError."""
        with contextlib.ExitStack() as stack:
            found: dict[str, Signal] = {}
            for name in (WEIGHTS, KV_CACHE, PREFIX_TREE):
                if name == WEIGHTS or (self._root / f"{name}.{self.suffix}").exists():
                    found[name] = Signal(name, self.suffix, root=self._root)
                    stack.callback(found[name].close)
            yield found

    @contextlib.contextmanager
    def _alone(self, deadline: float) -> Iterator[bool]:
        """One request at a time on this host; False where the deadline passes first."""
        lock = os.open(self._root / f"moebus_request.{self.suffix}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _try_lock(lock):
                if self._clock.monotonic() >= deadline:
                    yield False
                    return
                self._pause(_POLL_SECONDS)
            yield True
        finally:
            os.close(lock)


def check_suffix(suffix: str) -> str:
    """`suffix` where it can end a name in shared memory. Raises InvalidInput, field `suffix`."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", suffix):
        raise InvalidInput("suffix", f"1 to 64 of A-Z a-z 0-9 _ - are needed, not {suffix[:80]!r}")
    return suffix


def remove_signals(suffix: str, *, root: Path = SHM) -> None:
    """Removes everything under this suffix; for when no process uses it any more."""
    names = [f"{name}.{suffix}" for name in (WEIGHTS, KV_CACHE, PREFIX_TREE)]
    claims = [_claim_name(name, suffix) for name in (WEIGHTS, KV_CACHE, PREFIX_TREE)]
    for name in (*names, *claims, f"moebus_request.{check_suffix(suffix)}"):
        (root / name).unlink(missing_ok=True)


def _claim_name(name: str, suffix: str) -> str:
    return f"moebus_{name}_holder.{suffix}"


def _claimed(fd: int) -> bool:
    """Somebody who looks whether the holder lives has the lock for a moment: not to be taken for a holder."""
    for _ in range(_CLAIM_ATTEMPTS):
        if _try_lock(fd):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _try_lock(fd: int, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _text(signal: Signal) -> str:
    value = signal.value
    return f"{signal.name} is {int(value)} ({value.name.lower()})"


def _abandoned_answer(signal: Signal) -> LegacyAnswer:
    detail = f"{_text(signal)} and the process that held it has ended; start that again"
    return LegacyAnswer(404, detail, detail)
