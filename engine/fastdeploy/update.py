"""New weights for FastDeploy: it fetches a version by its own load strategy, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from moebus.engine.fastdeploy.api import Api
from moebus.engine.http.known import Known, Open
from moebus.engine.port import (
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineTainted,
    EngineUnknown,
    EngineUnreachable,
    Rank,
    RankFailed,
    Staged,
    Unsupported,
)
from moebus.engine.waiting import check_deadline
from moebus.schemas.tags import Tag

_WHOLE = ("Pause LLM Engine first", "Unsupported strategy", "model version not set", "unknown control method")
"""What FastDeploy says where nothing was written."""
_OPTIONS: dict[str, tuple[type, ...]] = {"verify_checksum": (bool,), "rsync_config": (dict,), "timeout": (int, float)}


class Update:
    """`ranks`: what each rank said of the last update."""

    def __init__(self, api: Api, known: Known) -> None:
        self._api = api
        self._known = known
        self.open = Open()
        self.ranks: tuple[Rank, ...] = ()

    def stage(
        self,
        version: str,
        source: str | None,
        digest: str | None,
        deadline: Deadline,
        options: Mapping[str, object] | None,
    ) -> Staged:
        check_deadline(deadline, "stage")
        if source is not None:
            raise Unsupported("source: FastDeploy has one of its own (--load-strategy); leave source out")
        if digest is not None:
            raise Unsupported("digest: FastDeploy tells none; leave it out, or set options.verify_checksum")
        for name, value in (options or {}).items():
            if name not in _OPTIONS:
                raise Unsupported(f"options.{name}: FastDeploy has no such option; it has {', '.join(_OPTIONS)}")
            if not isinstance(value, _OPTIONS[name]) or (name == "timeout" and isinstance(value, bool)):
                raise EngineRefused(f"options.{name}: {value!r} is no {_OPTIONS[name][-1].__name__}")
        return Staged(version, "none", None, None, self.open.add(dict(options or {})))

    def commit(self, staged: Staged, deadline: Deadline) -> None:
        options = self.open.get(staged.handle)
        belief = self._known.now()
        if not self._api.is_paused():
            raise EngineFailed("commit: the engine serves requests; pause it first")
        if not belief.resident[Tag.WEIGHT]:
            raise EngineFailed("commit: the weights are asleep; wake them first")
        self.open.drop(staged.handle)
        self._known.set(replace(belief, weights="mixed", version=None))
        try:
            with self._known.calling():
                told = self._api.update({"version": staged.version, **cast("dict[str, object]", options)}, deadline)
        except (EngineUnreachable, EngineRefused, Unsupported):
            self._known.set(belief)
            raise
        except EngineFailed as error:
            if any(text in str(error) for text in _WHOLE):
                self._known.set(belief)
                raise
            raise EngineTainted(f"{error}; other ranks may hold the new weights") from error
        except EngineUnknown as error:
            raise EngineTainted(f"{error}; FastDeploy does not tell which weights it holds") from error
        self.ranks = tuple(_rank(number, one) for number, one in enumerate(told))
        apart = [rank for rank in self.ranks if rank.version != staged.version]
        if apart:
            names = ", ".join(f"rank {rank.rank} says {rank.version!r}" for rank in apart)
            raise RankFailed(f"commit: not every rank holds {staged.version!r}: {names}")
        self._known.set(self._known.belief.loaded(staged.version, ""))


def _rank(number: int, told: Mapping[str, Any]) -> Rank:
    rank, version = told.get("rank", number), told.get("version")
    return Rank(rank if isinstance(rank, int) else number, None if version is None else str(version))
