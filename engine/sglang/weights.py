"""New weights for SGLang: from a folder it reads itself, or by a transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moebus.engine.http import Belief
from moebus.engine.http.known import Known, Open
from moebus.engine.http.span import Span
from moebus.engine.port import (
    CacheMode,
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineTainted,
    EngineUnauthorized,
    EngineUnknown,
    EngineUnreachable,
    Staged,
    Unsupported,
)
from moebus.engine.sglang.api import Api
from moebus.engine.sglang.drain import FLUSH_S, SETTLE_S, Drain
from moebus.engine.sglang.transfer import Transfer
from moebus.engine.sources import resolve_source
from moebus.engine.waiting import check_deadline
from moebus.schemas.errors import MoebusError
from moebus.schemas.tags import Tag

_WHOLE = ("Failed to get model config", "Failed to get weights iterator")
"""How SGLang begins what it says when it refused a load before the first write."""
_NOT_ASKED = (EngineUnauthorized, EngineUnreachable, Unsupported)


class Weights:
    """Used by the engine's thread. `in_place`: frozen requests keep their cache."""

    def __init__(self, api: Api, drain: Drain, known: Known, roots: Sequence[str], in_place: bool) -> None:
        self._api = api
        self._drain = drain
        self._known = known
        self._roots = tuple(roots)
        self._in_place = in_place
        self._transfer = Transfer(api)
        self.open = Open()

    def stage(
        self,
        version: str,
        source: str | None,
        digest: str | None,
        deadline: Deadline,
        options: Mapping[str, object] | None,
    ) -> Staged:
        check_deadline(deadline, "stage")
        for name in options or {}:
            raise Unsupported(f"options.{name}: SGLang has no such way to load weights")
        if digest is not None:
            raise Unsupported("digest: SGLang's checksums are of its own kind; leave digest out")
        path = None if source is None else resolve_source(source, self._roots)
        if path is not None and not path.is_dir():
            raise EngineRefused(f"source: {source!r} is no folder; SGLang loads a folder with config and weights")
        return Staged(version, "none", None, None if path is None else str(path), self.open.add())

    def commit(self, staged: Staged, cache: CacheMode, deadline: Deadline) -> None:
        self.open.get(staged.handle)
        self._writable("commit")
        held = self._api.load().all
        if cache != "keep" and self._in_place and held:
            raise EngineFailed(f"commit: {held} frozen requests need the cache; abort them, or commit with cache keep")
        path = staged.source or self._api.info().model_path
        if cache != "keep" and self._known.belief.resident[Tag.KV_CACHE]:
            # Before the load: nothing runs in between, and a refusal leaves the old weights.
            self._drain.flush(Span(FLUSH_S))
        self.open.drop(staged.handle)
        self._load(path, staged.version, deadline)
        self._known.set(self._known.belief.loaded(staged.version, staged.source or ""))

    def refill(self, deadline: Deadline) -> None:
        """Loads the committed weights again; the server's label of them has stayed."""
        self._load(self._known.belief.source or self._api.info().model_path, None, deadline)
        self._known.set(replace(self._known.belief, weights="valid"))

    def _load(self, path: str, version: str | None, deadline: Deadline) -> None:
        """Without a flush: SGLang ends itself where one behind a load finds a request."""
        body: dict[str, object] = {"model_path": path, "flush_cache": False, "abort_all_requests": False}
        label = self._api.weight_version()
        if version is not None:
            body["weight_version"] = version
        before = self._known.belief
        self._known.set(replace(before, weights="mixed"))
        try:
            with self._known.calling():
                self._api.post("/update_weights_from_disk", body, deadline)
        except _NOT_ASKED:
            self._known.set(before)
            raise
        except (EngineRefused, EngineFailed) as error:
            if any(text in str(error) for text in _WHOLE):
                self._known.set(before)
                raise EngineFailed(str(error)) from error
            raise EngineTainted(f"{error}; that the old weights are whole SGLang does not prove") from error
        except EngineUnknown as error:
            # The label changes only behind a load that succeeded.
            if version is None or label == version or not self._drain.labelled(version, Span(SETTLE_S)):
                raise EngineTainted(f"{error}; the weights may be a mixture") from error
        if version is not None and not self._drain.labelled(version, Span(SETTLE_S)):
            told = self._api.weight_version()
            raise EngineTainted(f"the load succeeded and the server still names version {told!r}, not {version!r}")

    def transfer(self, step: str, version: str | None, info: Mapping[str, object], deadline: Deadline) -> None:
        check_deadline(deadline, f"transfer {step}")
        call = self._transfer.plan(step, version, info)
        if step == "init":
            self._init(call, deadline)
            return
        before = self._writable("transfer")
        if step != "start" and not before.open_update:
            raise EngineFailed(f"transfer: {step} without start")
        self._known.set(replace(before, weights="mixed", source=None, version=None, open_update=True))
        try:
            with self._known.calling():
                if step == "start" and before.open_update:
                    self._transfer.end_stale(deadline)  # SGLang ends itself over a second start
                call(deadline)
                if version is not None and step == "finish" and not self._drain.labelled(version, Span(SETTLE_S)):
                    raise EngineFailed(f"the server does not name version {version!r}")
        except _NOT_ASKED:
            self._known.set(before)
            raise
        except MoebusError as error:
            raise EngineTainted(f"transfer {step}: {error}") from error
        done = replace(self._known.belief, weights="empty")
        if step == "finish":
            done = replace(done.loaded(version, None), open_update=False)
        self._known.set(done)

    def _init(self, call: Callable[[Deadline], None], deadline: Deadline) -> None:
        self._known.sure("transfer")
        try:
            with self._known.calling():
                call(deadline)
        except _NOT_ASKED:
            raise
        except MoebusError as error:
            raise EngineFailed(f"transfer init: {error}") from error

    def _writable(self, doing: str) -> Belief:
        belief = self._known.sure(doing)
        if not belief.paused:
            raise EngineFailed(f"{doing}: the engine serves requests; pause it first")
        if not belief.resident[Tag.WEIGHT]:
            raise EngineFailed(f"{doing}: the weights are asleep; wake them first")
        return belief
