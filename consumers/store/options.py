"""Settings of a store as it uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moebus.consumers.store.blobs.home import check_extra
from moebus.consumers.store.blobs.place import Place, check_endpoint, read_place
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.mirrors.open import check_mirrors
from moebus.consumers.store.partition import RESERVE
from moebus.observability.settings import MirrorSettings, StoreSettings
from moebus.producers.model_file import read_card
from moebus.schemas.errors import SettingsError


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`map_bytes`: of one partition. `commit_interval`: seconds; `commit_bytes`: a batch that large is committed at
    once. `sync=False` only in tests: without fsync. `quotas`: bytes that a run may hold in all partitions of the topic
    together (`*`: every run that is not named). `blobs`: where their bytes lie, None for LMDB; `blobs_endpoint`: of an
    S3 API; `blobs_timeout`: seconds of one request. `mirrors`: `folder:/path`, `p2pstore:redis://host:port`; `mirror`:
    what they have in common."""

    map_bytes: int = 8 << 30
    commit_interval: float = 0.02
    commit_bytes: int = 32 << 20
    rules: Rules = field(default_factory=Rules)
    sync: bool = True
    quotas: Mapping[str, int] = field(default_factory=dict)
    blobs: Place | None = None
    blobs_endpoint: str | None = None
    blobs_timeout: float = 30.0
    mirrors: tuple[str, ...] = ()
    mirror: MirrorSettings = field(default_factory=MirrorSettings)

    @classmethod
    def of(cls, settings: StoreSettings) -> StoreOptions:
        """Raises InvalidInput (field `store.cards`) where a model's file cannot be used; SettingsError, naming
        `store.blobs`, `store.blobs_endpoint`, `store.mirrors` or `store.mirror.NAME`."""
        open_ms, keep_ms = int(settings.open_ttl * 1000), int(settings.keep_ttl * 1000)
        cards = {run: read_card(path, "store.cards").digest for run, path in settings.cards.items()}
        last_turn = settings.keep == "last_turn"
        rules = Rules(open_ms, keep_ms, last_turn=last_turn, checks=settings.checks, cards=cards)
        place = read_place(settings.blobs)
        if place is not None:
            check_extra()
        endpoint = check_endpoint(settings.blobs_endpoint)
        if endpoint is not None and (place is None or not place.bucket):
            raise SettingsError(f"store.blobs_endpoint: only for s3://bucket/prefix, not for {settings.blobs}")
        check_mirrors(settings.mirrors, settings.mirror)
        return cls(
            settings.map_bytes, settings.commit_interval, settings.commit_bytes, rules, quotas=dict(settings.quotas),
            blobs=place, blobs_endpoint=endpoint, blobs_timeout=settings.blobs_timeout,
            mirrors=settings.mirrors, mirror=settings.mirror,
        )  # fmt: skip

    def rules_for(self, partitions: int) -> Rules:
        """Of one partition of a topic that has so many: it holds a run to its equal part of the quota."""
        return replace(self.rules, quotas={run: max(1, size // partitions) for run, size in self.quotas.items()})

    @property
    def batch_bytes(self) -> int:
        """Largest batch: an uncommitted one uses pages that the reserve for deletes must not lack."""
        return min(self.commit_bytes, max(1, int(self.map_bytes * RESERVE / 2)))
