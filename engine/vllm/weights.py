"""New weights for a vLLM server from files: it loads them in place, so nothing can be staged."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from moebus.engine.http.span import Span
from moebus.engine.port import (
    CacheMode,
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineTainted,
    EngineUnknown,
    EngineUnreachable,
    Staged,
    Unsupported,
)
from moebus.engine.sources import local_source
from moebus.engine.vllm.api import VllmApi
from moebus.engine.vllm.state import EMPTY, MIXED, Now, VllmState
from moebus.engine.waiting import check_deadline
from moebus.schemas.errors import MoebusError
from moebus.schemas.tags import Tag

LABEL_S = 30.0


@dataclass(eq=False)
class _Ready:
    """What `stage` found. `path`: for the server; `source`: as `Belief` has it. `kept`: a copy of what a URL named."""

    path: str
    source: str
    kept: ExitStack = field(default_factory=ExitStack)
    open: bool = True


class VllmWeights:
    """Used by the worker's thread."""

    def __init__(self, api: VllmApi, state: VllmState, roots: tuple[str, ...]) -> None:
        self._api = api
        self._state = state
        self._roots = roots

    def stage(
        self,
        version: str,
        source: str | None,
        digest: str | None,
        deadline: Deadline,
        options: Mapping[str, object] | None,
    ) -> Staged:
        """Looks at the source alone: names and shapes are checked by the server while it loads."""
        for name in options or {}:
            raise Unsupported(f"options.{name}: a vLLM server has no such way to load weights; name a source")
        if digest is not None:
            raise Unsupported("digest: a vLLM server does not tell the digest of what it loads; leave it out")
        if version in (EMPTY, MIXED):
            raise EngineRefused(f"version: {version!r} is what moebus calls weights that are no version")
        check_deadline(deadline, "stage")
        ready = self._ready(source, deadline)
        return Staged(version, "none", None, source, ready)

    def _ready(self, source: str | None, deadline: Deadline) -> _Ready:
        if source is None:
            return _Ready(self._api.own_model(deadline), "")
        kept = ExitStack()
        try:
            path = kept.enter_context(local_source(source, self._roots, pattern="*", deadline=deadline))
            _check_checkpoint(source, path)
        except BaseException:
            kept.close()
            raise
        return _Ready(str(path), source, kept)

    def discard(self, staged: Staged) -> None:
        ready = staged.handle
        if isinstance(ready, _Ready):
            ready.open = False
            ready.kept.close()

    def commit(self, now: Now, staged: Staged, cache: CacheMode, deadline: Deadline) -> None:
        """Raises EngineFailed: nothing was written.  EngineTainted: writing failed or its end is not known."""
        ready = staged.handle
        if not isinstance(ready, _Ready) or not ready.open:
            raise EngineFailed(f"commit: version {staged.version!r} is not staged any more; stage it again")
        now.need_pause("commit")
        belief = self._state.known
        if not belief.resident[Tag.WEIGHT]:
            raise EngineFailed("commit: the weights are asleep; wake them first")
        self._write(now, ready.path, deadline)
        self.discard(staged)
        self._state.change(now.life, lambda old: old.loaded(staged.version, ready.source))
        if cache != "keep" and belief.resident[Tag.KV_CACHE]:
            self._reset(deadline)
        self.mark(staged.version, now.life, deadline)

    def restore(self, deadline: Deadline) -> None:
        """Loads the committed version again, into memory that holds nothing."""
        belief = self._state.known
        if belief.source is None:
            raise EngineFailed("wakeup: the source of the committed weights is not known; update the weights")
        try:
            ready = self._ready(belief.source or None, deadline)
            with ready.kept:
                self._api.reload(ready.path, deadline)
        except MoebusError as error:
            raise EngineFailed(f"wakeup: the weights cannot be restored: {error}; update the weights") from error
        self._state.change(belief.life, lambda old: old.loaded(belief.version, belief.source))
        self.mark(belief.version, belief.life, deadline)

    def mark(self, label: str | None, life: str, deadline: Deadline) -> None:
        """Says what the weights are, here and in the server, which remembers it while its worker restarts. None: a
        version without a name, of a server that has no labels."""
        if label in (EMPTY, MIXED):
            self._state.change(life, lambda old: replace(old, weights="empty" if label == EMPTY else "mixed"))
        if self._state.labelled and label is not None:
            self._api.label(label, Span(min(max(deadline.remaining(), 1.0), LABEL_S)))

    def unmark(self, now: Now, deadline: Deadline) -> None:
        """Nothing was written after all: the weights are again what they were."""
        self._state.change(now.life, lambda old: replace(old, weights=now.belief.weights, version=now.belief.version))
        self.mark(now.found.version or EMPTY, now.life, deadline)

    def _write(self, now: Now, path: str, deadline: Deadline) -> None:
        self.mark(MIXED, now.life, deadline)
        try:
            self._api.reload(path, deadline)
        except (EngineRefused, Unsupported, EngineUnreachable) as error:  # refused, or never sent
            self.unmark(now, deadline)
            raise EngineFailed(f"commit: {error}") from error
        except (EngineFailed, EngineUnknown) as error:
            raise EngineTainted(f"commit: {error}; the weights may be mixed") from error

    def _reset(self, deadline: Deadline) -> None:
        """Old prefixes must not meet new weights. They may, where this fails, so the weights stay marked as mixed."""
        try:
            self._api.reset_cache(deadline)
        except MoebusError as error:
            raise EngineTainted(f"commit: the weights are new, but the cache was not reset: {error}") from error


def _check_checkpoint(source: str, path: Path) -> None:
    if not path.is_dir():
        raise EngineRefused(f"source: {source!r} is one file; a vLLM server loads the folder of a checkpoint")
    if not any(path.glob("*.safetensors")):
        raise EngineRefused(f"source: {source!r} has no .safetensors file")
