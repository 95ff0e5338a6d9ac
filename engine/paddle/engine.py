"""PaddleEngine: the Engine port over the parts of this package."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moebus.engine.admission import Admission
from moebus.engine.hooks import Hook, no_hook
from moebus.engine.options import check_options
from moebus.engine.paddle.calls import enter_all, wait_all
from moebus.engine.paddle.capture import RouteCapture
from moebus.engine.paddle.config import TINY, ModelConfig
from moebus.engine.paddle.device import default_device
from moebus.engine.paddle.handover import Handover
from moebus.engine.paddle.kvcache import KVCache
from moebus.engine.paddle.residency import Committed, WeightMemory
from moebus.engine.paddle.runner import Runner
from moebus.engine.paddle.scheduler import Scheduler
from moebus.engine.paddle.split import Split
from moebus.engine.paddle.swap import BlockSwap, HostBlock
from moebus.engine.paddle.tiers import CacheTiers
from moebus.engine.paddle.weights import Arrays, weights_digest
from moebus.engine.port import (
    CacheMode,
    Capabilities,
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineTainted,
    Generation,
    Inspection,
    Level,
    PauseMode,
    PauseResult,
    Prompt,
    Staged,
    Unsupported,
    WakeWeights,
)
from moebus.engine.prompts import check_prompt
from moebus.engine.waiting import Never, check_deadline
from moebus.schemas.model_card import ModelCard
from moebus.schemas.tags import ALL_TAGS, Tag

_LEVELS: frozenset[Level] = frozenset(("offload", "discard"))
CAPABILITIES = Capabilities(
    pause_modes=frozenset(("abort", "wait", "keep")),
    levels=dict.fromkeys(ALL_TAGS, _LEVELS),
    tags=frozenset(ALL_TAGS),
    stage="loaded",
    cache_modes=frozenset(("reset", "keep")),
    transfer=False,
    abort=True,
)
_JOIN_S = 30.0
_NEVER = Never()


def _capture_card(config: ModelConfig, self_check: bool) -> ModelCard:
    """The model's card; for the self check one whose ids can be any position."""
    card = config.card()
    return replace(card, num_experts=max(card.num_experts, config.max_position)) if self_check else card


@dataclass(eq=False)
class _Loaded:
    """Staged weights in host memory, until they are committed or discarded."""

    arrays: Arrays | None


class PaddleEngine:
    """A GeneratingEngine in this process: one model, one KV cache, one thread that runs the steps."""

    kind = "paddle"

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightMemory,
        *,
        hook: Hook = no_hook,
        self_check: bool = False,
    ) -> None:
        self.config = config
        self.hook = hook
        self.device = default_device()
        self._identity = uuid.uuid4().hex
        self._weights = weights
        self._cache = KVCache(config, self.device)
        card = _capture_card(config, self_check)
        self._capture = RouteCapture(card, config.num_slots, config.block_size, self.device)
        self._tiers = CacheTiers(
            config.num_blocks,
            config.block_size,
            weights.committed.version,
            BlockSwap(self._cache, self._capture, config.block_size),
            cpu_blocks=config.cpu_blocks,
            hook=self._on_step,
        )
        self._admission = Admission()
        runner = Runner(config, weights, self._cache, self._tiers.pool, self._capture, self_check=self_check)
        self._scheduler = Scheduler(runner, self._tiers, self._capture, self._admission, config, self._on_step)
        self._scheduler.usable = self._usable
        self._split = Split(config, weights, self._cache, self._capture, self._tiers, self._admission, self._scheduler)

    @classmethod
    def create(
        cls,
        config: ModelConfig = TINY,
        *,
        seed: int = 0,
        version: str = "initial",
        source: str | None = None,
        allowed_roots: Sequence[str] = (),
        hook: Hook = no_hook,
        self_check: bool = False,
    ) -> PaddleEngine:
        """An engine that serves `version`: the weights of `source`, else random ones drawn from `seed`.

        `self_check` records token positions in place of expert ids (a diagnosis of the capture path).

        Raises:
            PaddleUnavailable.  EngineRefused: `source` is not usable.
        """
        weights = WeightMemory(config, seed, version, source, allowed_roots)
        return cls(config, weights, hook=hook, self_check=self_check)

    # -- what may be asked at any time

    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def identity(self) -> str:
        return self._identity

    def inspect(self) -> Inspection:
        admission, weights = self._admission, self._weights
        swaps = self._tiers.participant(paused=admission.closed)
        with admission.changed:
            return Inspection(
                paused=admission.closed,
                in_flight=admission.in_flight,
                frozen=admission.frozen_count,
                resident={Tag.WEIGHT: weights.resident, Tag.KV_CACHE: self._cache.resident},
                weights_valid=weights.version is not None,
                version=weights.version,
                weights_digest=weights.digest,
                bytes_by_tag={Tag.WEIGHT: weights.nbytes, Tag.KV_CACHE: self._cache.nbytes},
                tainted=weights.tainted,
                participants=() if swaps is None else (swaps,),
            )

    @property
    def cache(self) -> CacheTiers[HostBlock]:
        """The prefix cache, for its counters."""
        return self._tiers

    @property
    def preemptions(self) -> int:
        """How often a request gave its blocks back and was computed again later."""
        return self._scheduler.lineup.preemptions

    @property
    def drafts(self) -> tuple[int, int]:
        """Tokens that the first draft layer proposed for requests that have ended, and those that came to be."""
        return self._scheduler.drafted, self._scheduler.accepted

    def weights(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """A host copy of the current weights, by name: what a trainer in this process starts from.

        Raises:
            EngineFailed: they are asleep or hold nothing.
        """
        with self._scheduler.device_lock:
            if self._weights.version is None:
                raise EngineFailed("weights: asleep or empty; wake or update them first")
            return self._weights.host_arrays()

    # -- requests

    def generate(self, prompt: Prompt, timeout: float) -> Generation:
        return self.generate_many([prompt], timeout)[0]

    def generate_many(self, prompts: Sequence[Prompt], timeout: float) -> list[Generation]:
        """All of `prompts` in flight together, results in their order; of equal prompts (`choices`) one is prefilled
        first and the others find it in the cache.

        Raises:
            As `generate`; where one fails, the first failure, after all have ended.
        """
        for prompt in prompts:
            self._check(prompt)
        with self._admission.changed:  # in one go, so that a shutdown meets all of a request or nothing
            requests = enter_all(self._admission, prompts, self.config.eos_token_ids)
            for request in requests:
                self._scheduler.submit(request)
        return wait_all(self._admission, requests, timeout)

    def prefill(self, prompt: Prompt, timeout: float) -> Handover:
        """Computes the prompt and samples the first token (none with `max_tokens` 0), for an engine elsewhere that goes
        on. `on_token` sees that one token here.

        Raises:
            As `generate`.  PrefillAborted: before there was anything to hand over.
        """
        self._check(prompt)
        return self._split.prefill(prompt, timeout)

    def decode(self, handover: Handover, prompt: Prompt, timeout: float) -> Generation:
        """Goes on where `prefill` of the same prompt ended, in another engine of the same model and weights: what it
        returns is what one engine would. `on_token` sees every token, the first one too.

        Raises:
            As `generate`.  HandoverRefused: damaged, or of another prompt, model or weight version; nothing was done.
        """
        self._check(prompt)
        return self._split.decode(handover, prompt, timeout)

    def _check(self, prompt: Prompt) -> None:
        check_prompt(prompt, self.config.vocab_size, min(self.config.max_position, self.config.num_slots))

    def suspend_capture(self) -> None:
        """From the next step on no routes are recorded (a round that nobody replays): requests that run meanwhile have
        `routes` None. Weight versions of rows are."""
        with self._scheduler.device_lock:
            self._capture.suspended = True

    def resume_capture(self) -> None:
        """Undoes `suspend_capture`, and drops the prefix cache: blocks of that time have no routes."""
        with self._scheduler.device_lock:
            if self._capture.suspended:
                self._capture.suspended = False
                self._tiers.reset(self._weights.committed.version)

    def abort_requests(self, ids: Sequence[str] | None) -> list[str]:
        self.hook("abort_requests", "all" if ids is None else ",".join(ids), None)
        return self._admission.abort(ids)

    # -- lifecycle

    def pause(self, mode: PauseMode, deadline: Deadline) -> PauseResult:
        self.hook("pause", mode, deadline)
        with self._admission.restored_on_failure():
            result = self._admission.pause(mode, deadline, self._scheduler.still)
            self.device.synchronize()
            with self._scheduler.device_lock:
                self._capture.flush()
            swaps = self._tiers.drain(deadline)
            return replace(result, participants=() if swaps is None else (swaps,))

    def resume(self) -> None:
        self.hook("resume", "", None)
        with self._admission.changed:
            if not self._usable():
                raise EngineFailed(f"resume: {self._what_is_missing()}; wake or update first")
            self._admission.resume()

    def sleep(self, tag: Tag, level: Level, deadline: Deadline) -> int:
        self._begin("sleep", str(tag), deadline)
        with self._scheduler.device_lock:
            self._need_pause("sleep")
            freed = self._weights.sleep(level, deadline) if tag is Tag.WEIGHT else self._sleep_cache()
        self.device.release_unused()
        return freed

    def _sleep_cache(self) -> int:
        if self._admission.in_flight:
            raise EngineFailed("sleep: frozen requests need the kv_cache; abort them first")
        freed = self._cache.nbytes
        self._cache.release()
        self._tiers.reset(self._weights.committed.version)
        return freed

    def wakeup(self, tag: Tag, weights: WakeWeights, deadline: Deadline) -> int:
        self._begin("wakeup", str(tag), deadline)
        with self._scheduler.device_lock:
            if tag is Tag.WEIGHT:
                return self._weights.wake(weights, deadline)
            if self._cache.resident:
                return 0
            self._cache.allocate()
            return self._cache.nbytes

    # -- weights

    def stage(
        self,
        version: str,
        source: str | None,
        digest: str | None,
        deadline: Deadline,
        options: Mapping[str, object] | None = None,
    ) -> Staged:
        check_options(options, self.kind)
        self._begin("stage", version, deadline)
        arrays = self._weights.load(source, deadline)
        found = weights_digest(arrays)
        if digest is not None and digest.lower() != found:
            raise EngineRefused(f"digest: {digest!r} was asked for, the weights have {found!r}")
        return Staged(version, "loaded", found, source, _Loaded(arrays))

    def commit(self, staged: Staged, cache: CacheMode, deadline: Deadline) -> None:
        self._begin("commit", staged.version, deadline)
        if cache not in CAPABILITIES.cache_modes:
            raise Unsupported(f"cache: {cache!r} is not supported by the paddle engine; reset and keep are")
        loaded = staged.handle
        if not isinstance(loaded, _Loaded) or loaded.arrays is None or staged.weights_digest is None:
            raise EngineFailed(f"commit: version {staged.version!r} is not staged here; stage it again")
        new = Committed(staged.version, staged.source, staged.weights_digest)
        with self._scheduler.device_lock:
            self._need_pause("commit")
            if not self._weights.resident:
                raise EngineFailed("commit: the weights are asleep; wake them first")
            try:
                self._weights.commit(new, loaded.arrays, self._on_write)
            except EngineTainted:
                self._tiers.reset(staged.version)  # nothing of a mixture may be hit
                raise
            if cache == "reset":
                self._tiers.reset(staged.version)
        loaded.arrays = None

    def discard(self, staged: Staged) -> None:
        self.hook("discard", staged.version, None)
        if isinstance(staged.handle, _Loaded):
            staged.handle.arrays = None

    def transfer(self, step: str, version: str | None, info: Mapping[str, object], deadline: Deadline) -> None:
        raise Unsupported("transfer: the paddle engine takes weights from files only; use update_weights")

    def reset_cache(self) -> int:
        self.hook("reset_cache", "", None)
        with self._scheduler.device_lock:
            return self._tiers.reset(self._weights.committed.version)

    def close(self) -> None:
        """Aborts what runs, ends the thread and frees the memory."""
        self._admission.shut_down()
        self._scheduler.join(_JOIN_S)
        self._tiers.close(_JOIN_S)
        with self._scheduler.device_lock:
            self._capture.flush()
            self._weights.sleep("discard", _NEVER)
            self._cache.release()
        self.device.release_unused()

    # -- shared by the methods above

    def _begin(self, method: str, subject: str, deadline: Deadline) -> None:
        self.hook(method, subject, deadline)
        check_deadline(deadline, method)

    def _on_step(self, point: str, subject: str, deadline: Deadline | None) -> None:
        self.hook(point, subject, deadline)

    def _on_write(self, name: str) -> None:
        self.hook("write", name, None)

    def _usable(self) -> bool:
        return self._cache.resident and self._weights.version is not None

    def _what_is_missing(self) -> str:
        if not self._weights.resident:
            return "weight is asleep"
        if self._weights.version is None:
            return "the weights are not valid"
        return "kv_cache is asleep"

    def _need_pause(self, method: str) -> None:
        if not self._admission.closed:
            raise EngineFailed(f"{method}: the engine serves requests; pause it first")
