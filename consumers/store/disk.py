"""How much of a disk each partition of a store may take.

The files of LMDB never shrink: without a rule, the partition that fills up first keeps the disk and the others starve,
whatever is deleted later. So half of what there is belongs to the partitions in equal parts, used or not; the other
half goes to whoever comes first.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from moebus.consumers.store.env import file_bytes

GUARANTEED = 0.5
"""Part of the disk that is divided evenly."""


def fair_room(held: Mapping[int, int], free: int, number: int) -> int:
    """Bytes that the file of `number` may grow to. `held`: bytes of each partition's file; `free`: of the disk.

    Where less is free than the partitions still have to get of their parts, each gets of it in proportion.
    """
    part = int(GUARANTEED * (sum(held.values()) + free) / len(held))
    missing = {one: max(0, part - size) for one, size in held.items()}
    total, mine = sum(missing.values()), missing[number]
    if free >= total:
        return held[number] + free - (total - mine)
    return held[number] + free * mine // total


class DiskShares:
    """Of the partitions of one store, which lie on one disk. Any thread may ask."""

    def __init__(self, paths: Mapping[int, Path], map_bytes: int) -> None:
        self._paths = dict(paths)
        self._map_bytes = map_bytes

    def room(self, number: int) -> int:
        """Bytes that its file may grow to: the map, or less where its share of the disk is less."""
        held = {one: file_bytes(path) for one, path in self._paths.items()}
        return min(self._map_bytes, fair_room(held, _free(self._paths[number]), number))


def _free(path: Path) -> int:
    """Bytes that are free on the disk of the path, or of the folder above it that exists."""
    for one in (path, *path.parents):
        try:
            return shutil.disk_usage(one).free
        except FileNotFoundError:
            continue
    return 0
