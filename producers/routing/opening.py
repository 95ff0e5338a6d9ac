"""`RoutingPublisher.from_settings`: reads the settings and decides who sends."""

from __future__ import annotations

from moebus.broker import open_broker
from moebus.broker.topics import Topics
from moebus.observability.metrics import Metrics
from moebus.observability.settings import Settings, load_settings
from moebus.producers.routing.high_water import OnHighWater
from moebus.producers.routing.publisher import Mode, RoutingPublisher
from moebus.schemas.model_card import ModelCard


def open_publisher(
    kind: type[RoutingPublisher],
    *,
    card: ModelCard | None,
    run: str | None,
    epoch: int,
    mode: Mode | None,
    settings: Settings | None,
    metrics: Metrics | None,
    on_high_water: OnHighWater | None,
) -> RoutingPublisher:
    """See `RoutingPublisher.from_settings`."""
    found = settings or load_settings()
    return kind(
        open_broker(found.kafka),
        Topics(found.topic_prefix),
        run=run or found.run,
        card=card,
        epoch=epoch,
        options=found.publisher,
        metrics=metrics,
        owns_broker=True,
        on_high_water=on_high_water,
    )
