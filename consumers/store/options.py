"""Settings of a store as it uses them."""

from __future__ import annotations

from dataclasses import dataclass, field

from moebus.consumers.store.decide import Rules
from moebus.consumers.store.partition import RESERVE
from moebus.observability.settings import StoreSettings


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`map_bytes`: of one partition. `commit_interval`: seconds; `commit_bytes`: a batch that large is committed at
    once. `sync=False` only in tests: without fsync."""

    map_bytes: int = 8 << 30
    commit_interval: float = 0.02
    commit_bytes: int = 32 << 20
    rules: Rules = field(default_factory=Rules)
    sync: bool = True

    @classmethod
    def of(cls, settings: StoreSettings) -> StoreOptions:
        open_ms, keep_ms = int(settings.open_ttl * 1000), int(settings.keep_ttl * 1000)
        rules = Rules(open_ms, keep_ms, last_turn=settings.keep == "last_turn", checks=settings.checks)
        return cls(settings.map_bytes, settings.commit_interval, settings.commit_bytes, rules)

    @property
    def batch_bytes(self) -> int:
        """Largest batch: an uncommitted one uses pages that the reserve for deletes must not lack."""
        return min(self.commit_bytes, max(1, int(self.map_bytes * RESERVE / 2)))
