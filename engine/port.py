"""The Engine port: what a control worker may ask of an inference engine.

Adapters: `moebus.engine.simulated`, `moebus.engine.paddle` (in this process), FastDeploy, vLLM and SGLang over HTTP.
One contract suite (`tests/contract/`) holds for all of them.

Rules for every method: called from one thread at a time except `inspect`, `identity` and `capabilities`, which
must answer within 1 s also while another call runs. A method that raises has had no effect unless its
docstring says otherwise. `deadline` is polled by long operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from moebus.schemas.errors import FatalError, RetriableError
from moebus.schemas.tags import Tag

PauseMode = Literal["abort", "wait", "keep"]
Level = Literal["offload", "discard"]
WakeWeights = Literal["restore", "empty"]
CacheMode = Literal["reset", "keep", "recompute"]
StageKind = Literal["loaded", "validated", "none"]
FinishReason = Literal["stop", "length", "abort"]


class EngineTimeout(RetriableError):
    """The deadline passed; the operation was stopped and the engine is as `inspect` says."""


class Unsupported(FatalError):
    """This engine cannot do what was asked; nothing was changed."""


class EngineRefused(FatalError):
    """Refused before the first effect (bad file, wrong shape, path outside the allowed roots); the text says why."""


class EngineUnauthorized(EngineRefused):
    """The engine's server refused the credentials of its worker; nothing was changed."""


class EngineUnreachable(RetriableError):
    """The engine's server takes no connection; nothing was asked of it."""


class EngineUnknown(FatalError):
    """The answer of the engine's server was lost after the call was sent, and its state does not prove whether the
    effect happened. `late`: the deadline passed while waiting, the connection was whole."""

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class EngineFailed(FatalError):
    """Failed with the engine's memory whole (as `inspect` says)."""


class EngineTainted(FatalError):
    """An in-place write was cut off: the weights may be a mixture of two versions."""


class RankFailed(EngineTainted):
    """Parts of one engine hold different versions; the text names the ranks."""


class Deadline(Protocol):
    """Time left for an operation."""

    def remaining(self) -> float:
        """Seconds; 0.0 or less when over; `inf` when there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the engine can do; a worker answers `unsupported` for the rest."""

    pause_modes: frozenset[PauseMode]
    levels: Mapping[Tag, frozenset[Level]]
    tags: frozenset[Tag]
    stage: StageKind
    cache_modes: frozenset[CacheMode]
    transfer: bool
    abort: bool
    sleeps_whole: bool = False
    """Tags sleep only together; they may wake one by one."""
    wakes_whole: bool = False
    """What sleeps wakes only together."""


@dataclass(frozen=True, slots=True)
class Participant:
    """A part of the engine with an executor of its own that a pause has to wait for, such as the one that moves cached
    blocks between device and host. `in_flight`: transfers under way now; `finished`: since the start; `cut`: names of
    those that the last pause had to cut at its deadline (nothing wrong is left behind by one)."""

    name: str
    state: Literal["running", "paused"]
    in_flight: int
    finished: int
    cut: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of an engine that is spread over several: what its part of the weights is, None where unknown."""

    rank: int
    version: str | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """The engine as it is now, read from the engine and not from what was asked of it.

    `version` is None where the weights hold nothing or the version is unknown. `bytes_by_tag`: bytes the engine
    holds on the device. `in_flight`: requests admitted and not finished (frozen ones included). `ranks`: empty for
    an engine of one process.
    """

    paused: bool
    in_flight: int
    frozen: int
    resident: Mapping[Tag, bool]
    weights_valid: bool
    version: str | None
    weights_digest: str | None
    bytes_by_tag: Mapping[Tag, int]
    tainted: bool = False
    participants: tuple[Participant, ...] = ()
    ranks: tuple[Rank, ...] = ()

    @property
    def apart(self) -> str:
        """Which ranks hold another version than the engine says, for people; empty where none does."""
        others = [f"rank {one.rank} holds {one.version!r}" for one in self.ranks if one.version != self.version]
        return f"the engine says {self.version!r}, {', '.join(others)}" if others else ""


@dataclass(frozen=True, slots=True)
class PauseResult:
    """How the drain ended. `idle_confirmed`: the device has finished all queued work. `participants`: what else took
    part."""

    aborted: int
    finished: int
    frozen: int
    idle_confirmed: bool
    participants: tuple[Participant, ...] = ()


@dataclass(frozen=True, slots=True)
class Staged:
    """A checked set of new weights that `commit` makes current. `weights_digest`: XXH3-128 hex over the tensors
    in order of name, None where the engine cannot tell. `handle` belongs to the engine."""

    version: str
    kind: StageKind
    weights_digest: str | None
    source: str | None
    handle: object = field(default=None, compare=False, repr=False)


class Engine(Protocol):
    """A rollout engine as its worker drives it."""

    @property
    def kind(self) -> str:
        """`paddle`, `simulated`, ..."""
        ...

    def capabilities(self) -> Capabilities: ...

    def identity(self) -> str:
        """Changes whenever engine memory was lost."""
        ...

    def inspect(self) -> Inspection: ...

    def pause(self, mode: PauseMode, deadline: Deadline) -> PauseResult:
        """Closes admission and drains: `abort` ends what runs with its partial output, `wait` lets it finish, `keep`
        freezes it. Returns only when nothing runs. Idempotent.

        Raises:
            EngineTimeout: something still ran at the deadline; admission is open again as before.
        """
        ...

    def resume(self) -> None:
        """Opens admission; frozen requests go on. The caller has checked that all is resident and valid."""
        ...

    def sleep(self, tag: Tag, level: Level, deadline: Deadline) -> int:
        """Releases the device memory of `tag`; returns the bytes freed, 0 where the engine does not tell. `kv_cache`
        drops the prefix cache. Where tags sleep only together, one call releases all and the others find it done."""
        ...

    def wakeup(self, tag: Tag, weights: WakeWeights, deadline: Deadline) -> int:
        """Allocates `tag` again; returns the bytes, 0 where the engine does not tell. For `weight`, `restore` fills it
        from the host copy, else from the committed source; EngineFailed (and still asleep) where neither is there.
        Never opens admission."""
        ...

    def stage(
        self,
        version: str,
        source: str | None,
        digest: str | None,
        deadline: Deadline,
        options: Mapping[str, object] | None = None,
    ) -> Staged:
        """Checks names, shapes, dtypes and digests of new weights and keeps them ready; the current ones stay.
        `options`: of this kind of engine (`verify_checksum`, `rsync_config`); Unsupported where it has no such thing.

        Raises:
            EngineRefused: with what is wrong.
        """
        ...

    def commit(self, staged: Staged, cache: CacheMode, deadline: Deadline) -> None:
        """Makes staged weights current and treats the prefix cache as `cache` says. Not stopped by the deadline once
        the first write has begun.

        Raises:
            EngineFailed: memory whole, still the old version.  EngineTainted: cut off in the middle.
        """
        ...

    def discard(self, staged: Staged) -> None:
        """Drops what `stage` kept. Idempotent."""
        ...

    def transfer(self, step: str, version: str | None, info: Mapping[str, object], deadline: Deadline) -> None:
        """One step (`init`, `start`, `update`, `finish`) of a weight transfer by the engine's own means. The prefix
        cache stays: whoever wants it gone calls `reset_cache` behind `finish`."""
        ...

    def reset_cache(self) -> int:
        """Drops the prefix cache; returns the blocks dropped, 0 where the engine does not tell."""
        ...

    def abort_requests(self, ids: Sequence[str] | None) -> list[str]:
        """Ends these requests (None: all) with reason `abort`, after the step under way; returns the ids that ran,
        `?` for one that the engine counts and does not name."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One generation request. `token_ids`: int64 [P], P >= 1. `max_tokens` 0 only prefills (routes of the prompt).
    `temperature` 0 = greedy. `request_id` is unique among the requests in flight (the rollout id plus `#choice` by
    custom). `ignore_eos`: the model's own end tokens do not end it. `on_token(token, logprob)` is called for each
    sampled token, in order, on the engine's thread: it must be quick and may call nothing of the engine but
    `abort_requests`; if it raises, the request fails."""

    request_id: str
    token_ids: npt.NDArray[np.int64]
    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    capture_routes: bool = True
    ignore_eos: bool = False
    on_token: Callable[[int, float], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request.

    `token_ids`: int64 [O], the sampled ones only. `logprobs`: float32 [O], natural log, of the sampled tokens.
    `routes`: uint8/uint16/uint32 [rows, moe_layers, top_k] with rows = P + O - 1 (P if O = 0 and prefilled, else 0);
    None where capture was off. `versions`: ((start_row, version), ...) ascending, first start 0.
    `cached_tokens`: prompt tokens served by the prefix cache.
    """

    request_id: str
    prompt_tokens: int
    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    routes: npt.NDArray[np.unsignedinteger] | None
    versions: tuple[tuple[int, str], ...]
    cached_tokens: int

    @property
    def version_ranges(self) -> tuple[tuple[int, int, str], ...]:
        """`versions` as ((start_row, stop_row, version), ...)."""
        rows = self.prompt_tokens + max(len(self.token_ids) - 1, 0)
        stops = [*(start for start, _ in self.versions[1:]), rows]
        return tuple((start, stop, version) for (start, version), stop in zip(self.versions, stops, strict=False))


class EngineClosed(RetriableError):
    """The engine takes no prompts now (paused, asleep, empty or shutting down)."""


class GeneratingEngine(Engine, Protocol):
    """An engine in this process: it takes prompts too. `generate` may be called from many threads at once."""

    def generate(self, prompt: Prompt, timeout: float) -> Generation:
        """Blocks until the request has finished.

        Raises:
            EngineClosed: admission is closed.  InvalidInput: the prompt names what is wrong with it.
            EngineTimeout: not finished in `timeout` seconds; it was aborted.
        """
        ...
