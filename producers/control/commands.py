"""The commands of a fleet as Python methods; what carries them out is in `client`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

from moebus.producers.control.operation import Progress
from moebus.schemas.control import DEFAULT_DEADLINE_S, UPDATE_DEADLINE_S, Expect
from moebus.schemas.control_args import CacheMode, Level, Method, PauseMode, TransferStep, WakeWeights

if TYPE_CHECKING:
    from typing_extensions import Unpack

R = TypeVar("R")
TargetLike = str | Sequence[str] | None


class CallOptions(TypedDict, total=False):
    """What every command takes beside its own arguments.

    target: `all` (default), a label selector, one id, or a list of ids.
    timeout: seconds in which it may run and is waited for (default 60, updates 600).
    request_id: the identity of the command (default `control-<uuid4>`); the same one again joins the first.
    run, expect: refuse on another run, after another command, at another version.
    min_ok: how many good answers are enough (default: every expected worker).
    check: False returns the outcome instead of raising FleetError.
    progress: sees every answer as it arrives.
    """

    target: TargetLike
    timeout: float
    request_id: str
    run: str
    expect: Expect
    min_ok: int
    check: bool
    progress: Progress


class Commands(ABC, Generic[R]):
    """Every method appends one command, waits and returns its Outcome (R), or an awaitable of it.

    Raises:
        FleetError: the outcome is not ok (FleetPartial, FleetTimeout by status); not with `check=False`.
        InvalidInput: an argument, named; nothing was sent.  BrokerUnavailable: within 15 s.
    """

    @abstractmethod
    def call(self, method: Method | str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> R:
        """Appends a command, waits for it and returns its outcome."""

    def pause(self, mode: PauseMode = "abort", **options: Unpack[CallOptions]) -> R:
        """Closes admission and drains: requests end with what they have (`abort`), finish (`wait`), freeze (`keep`)."""
        return self.call(Method.PAUSE, {"mode": mode}, **options)

    def resume(self, **options: Unpack[CallOptions]) -> R:
        """Opens admission; needs every tag resident and the weights valid."""
        return self.call(Method.RESUME, None, **options)

    def sleep(
        self,
        tags: Iterable[str] | str | None = None,
        level: Level = "offload",
        mode: PauseMode = "abort",
        **options: Unpack[CallOptions],
    ) -> R:
        """Frees device memory by tag (`weight`, `kv_cache`; None = both); pauses a running engine first, in `mode`."""
        return self.call(Method.SLEEP, {**_tags(tags), "level": level, "mode": mode}, **options)

    def wakeup(
        self,
        tags: Iterable[str] | str | None = None,
        weights: WakeWeights = "restore",
        resume: bool = False,
        **options: Unpack[CallOptions],
    ) -> R:
        """Takes device memory again by tag. `weights=empty`: allocated, to be filled by an update or a transfer."""
        return self.call(Method.WAKEUP, {**_tags(tags), "weights": weights, "resume": resume}, **options)

    def update_weights(
        self,
        version: str,
        source: str | None = None,
        digest: str | None = None,
        cache: CacheMode = "reset",
        **options: Unpack[CallOptions],
    ) -> R:
        """New weights on every target or on none: all stage, then `commit` is decided, or `void` if one cannot."""
        args = {"version": version, "source": source, "digest": digest, "cache": cache}
        options.setdefault("timeout", UPDATE_DEADLINE_S)
        return self.call(Method.UPDATE_WEIGHTS, {k: v for k, v in args.items() if v is not None}, **options)

    def transfer_weights(
        self,
        step: TransferStep,
        version: str | None = None,
        info: Mapping[str, Any] | None = None,
        cache: CacheMode = "reset",
        **options: Unpack[CallOptions],
    ) -> R:
        """One step of a transfer by the engine's own means (NCCL, IPC); `info` is opaque to moebus."""
        args = {"step": step, "version": version, "info": None if info is None else dict(info), "cache": cache}
        return self.call(Method.TRANSFER_WEIGHTS, {k: v for k, v in args.items() if v is not None}, **options)

    def reset_cache(self, **options: Unpack[CallOptions]) -> R:
        """Drops the prefix caches."""
        return self.call(Method.RESET_CACHE, None, **options)

    def abort_requests(self, ids: Sequence[str] | None = None, all: bool = False, **options: Unpack[CallOptions]) -> R:
        """Ends these requests, or every one with `all=True`."""
        args: dict[str, Any] = {"all": all} if ids is None else {"ids": list(ids), **({"all": True} if all else {})}
        return self.call(Method.ABORT_REQUESTS, args, **options)

    def status(self, **options: Unpack[CallOptions]) -> R:
        """Asks every worker what it holds; read ahead of long operations."""
        return self.call(Method.STATUS, None, **options)

    def begin_run(self, name: str, **options: Unpack[CallOptions]) -> R:
        """Begins the run `name`: paused, awake, weights as they are; commands of older runs are refused after it."""
        return self.call(Method.BEGIN_RUN, {"run": name}, **options)


def default_timeout(method: Method | str) -> float:
    """Seconds a command may take where nothing is said."""
    return UPDATE_DEADLINE_S if str(method) == Method.UPDATE_WEIGHTS else DEFAULT_DEADLINE_S


def _tags(tags: Iterable[str] | str | None) -> dict[str, Any]:
    if tags is None:
        return {}
    return {"tags": tags if isinstance(tags, str) else [str(tag) for tag in tags]}
