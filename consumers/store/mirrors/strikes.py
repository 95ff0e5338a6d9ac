"""Which ids fail while others go well: those are put aside for a while, so that they hold up nobody and fill no log."""

from __future__ import annotations

from dataclasses import dataclass, field

LIMIT = 5
ASIDE_SECONDS = 600.0


@dataclass(slots=True)
class Strikes:
    """Pure: time is passed in. A failure counts only if something went well since the last one: an outage is nobody's
    fault."""

    _successes: int = 0
    _failures: dict[str, tuple[int, int]] = field(default_factory=dict)
    _aside: dict[str, float] = field(default_factory=dict)

    def well(self, one: str) -> None:
        """It went well."""
        self._successes += 1
        self._failures.pop(one, None)
        self._aside.pop(one, None)

    def failed(self, one: str, now: float) -> bool:
        """Whether it is put aside now."""
        count, before = self._failures.get(one, (0, -1))
        if before != self._successes:
            count += 1
        self._failures[one] = (count, self._successes)
        if count < LIMIT:
            return False
        del self._failures[one]
        self._aside[one] = now
        return True

    def is_aside(self, one: str) -> bool:
        return one in self._aside

    def due(self, now: float) -> list[str]:
        """Those whose turn comes again."""
        found = [one for one, since in self._aside.items() if now - since >= ASIDE_SECONDS]
        for one in found:
            del self._aside[one]
        return found
