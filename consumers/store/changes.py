"""Which rollouts a batch changed, for mirrors."""

from __future__ import annotations

from dataclasses import dataclass, field

from moebus.schemas.rollout import RolloutKey

_MANY = 10_000


@dataclass(slots=True)
class Changes:
    """`many`: there were more than `keys` names."""

    keys: list[RolloutKey] = field(default_factory=list)
    many: bool = False

    def add(self, key: RolloutKey) -> None:
        if len(self.keys) < _MANY:
            self.keys.append(key)
        else:
            self.many = True
