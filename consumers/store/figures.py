"""What a partition of the store says of itself: a batch that it committed, and how full it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from moebus.consumers.store.changes import Changes


@dataclass(slots=True)
class Batch:
    """What a commit made durable. `whole`: attempts that became so. `now_readable`: append times (ms) of the ENDs of
    those that could not be read before it. `changes`: only where somebody watches."""

    whole: int = 0
    now_readable: list[int] = field(default_factory=list)
    removed: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    changes: Changes = field(default_factory=Changes)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Of one run in one partition. `used_bytes`: of whole attempts; `open_bytes`: of what is not whole yet.
    `quota_bytes`: of either, None without one. `card`: digest of the model card that it is held to, None where that is
    not known yet."""

    run: str
    used_bytes: int
    open_bytes: int
    quota_bytes: int | None
    card: str | None


@dataclass(frozen=True, slots=True)
class Figures:
    """For statistics and gauges, as of the last commit; `room_bytes`: the map, or what the disk leaves of it, now."""

    next_offset: int | None
    now_ms: int
    whole: int
    used_bytes: int
    map_bytes: int
    room_bytes: int
