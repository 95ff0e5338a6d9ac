"""The port of mirrors: where a copy of every complete rollout is kept for readers that are not ours.

A mirror has no fences and no attempts: it holds what the index of the store says now, a little later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moebus.schemas.dtypes import RouteArray

Layout = Literal["layers", "fused", "both"]
"""One array a layer, all layers in one, or both, as FastDeploy's `use_fused_put` says."""
MirrorKind = Literal["p2pstore", "folder"]


class MirrorDown(Exception):
    """The target cannot be reached or does not take it now; the text says where and why. Later it may."""


class Occupied(Exception):
    """What lies there is not ours, and stays; the text says what it is."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """Under which names a rollout lies in a target."""

    rollout_id: str
    layers: int
    layout: Layout

    @property
    def fused(self) -> bool:
        return self.layout != "layers"

    @property
    def split(self) -> bool:
        return self.layout != "fused"


class Target(Protocol):
    """One thread uses it; it may block for as long as its timeouts say."""

    kind: MirrorKind
    where: str
    forgets: bool
    """What it holds dies with this process."""

    def refuses(self, rollout_id: str, layout: Layout) -> str | None:
        """Why an id cannot be mirrored; None where it can."""
        ...

    def put(self, shelf: Shelf, fused: RouteArray) -> None:
        """`fused`: [layers, rows, top_k] as FastDeploy has it. What we put there before is replaced. Raises MirrorDown;
        Occupied where something else lies."""
        ...

    def delete(self, shelves: Sequence[Shelf]) -> None:
        """Those that are not there, or not ours, are no error. Raises MirrorDown."""
        ...

    def has(self, shelf: Shelf) -> bool:
        """Whether all of it is there. Raises MirrorDown."""
        ...

    def life(self) -> str:
        """Something that is another once the target may have forgotten what it held. Raises MirrorDown."""
        ...

    def close(self) -> None:
        """Ends connections."""
        ...
