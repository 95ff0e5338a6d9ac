"""What an adapter knows of a server that does not tell it.

The rule: what the server says of itself is read back on every look. A belief is held only of what it does not say, it
is of one life of the server (`life`, see `Lives`) and is given up with it. Where it is only a guess (`sure` is False,
or a tag is `unsure`: the worker came to a server that was already paused, or an answer was lost) nothing that depends
on it may open traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from moebus.engine.port import Level
from moebus.schemas.tags import ALL_TAGS, Tag

Hold = Literal["valid", "empty", "mixed"]


def _all(value: bool) -> Mapping[Tag, bool]:
    return MappingProxyType(dict.fromkeys(ALL_TAGS, value))


@dataclass(frozen=True, slots=True)
class Belief:
    """Values, replaced whole: `inspect` reads it from another thread.

    `level`: how the sleeping weights were put to sleep, None awake or unknown. `weights`: what the weight memory holds.
    `version`: of the weights, None unknown. `source`: where the committed weights came from ("" the engine's own),
    None where they cannot be loaded again. `frozen`: requests held by a pause with `keep`. `open_update`: the server
    was told that a transfer begins, and not that it ended. `unsure`: tags whose residency is a guess.
    """

    life: str = ""
    sure: bool = True
    unsure: frozenset[Tag] = frozenset()
    resident: Mapping[Tag, bool] = field(default_factory=lambda: _all(True))
    level: Level | None = None
    weights: Hold = "valid"
    version: str | None = None
    source: str | None = ""
    frozen: int = 0
    paused: bool = False
    open_update: bool = False

    def slept(self, level: Level) -> Belief:
        return replace(self, resident=_all(False), level=level, frozen=0, paused=True, unsure=frozenset())

    def with_tag(self, tag: Tag, resident: bool) -> Belief:
        tags = MappingProxyType({**self.resident, tag: resident})
        awake = tags.get(Tag.WEIGHT, False)
        return replace(self, resident=tags, level=None if awake else self.level, unsure=self.unsure - {tag})

    def loaded(self, version: str | None, source: str | None) -> Belief:
        return replace(self, weights="valid", version=version, source=source)

    @property
    def asleep(self) -> tuple[Tag, ...]:
        return tuple(tag for tag in ALL_TAGS if not self.resident.get(tag, True))
