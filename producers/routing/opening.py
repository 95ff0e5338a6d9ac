"""`RoutingPublisher.from_settings`: reads the settings and decides who sends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from moebus.broker import open_broker
from moebus.broker.topics import Topics
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.observability.settings import PublisherSettings, Settings, load_settings
from moebus.producers.routing.high_water import OnHighWater
from moebus.producers.routing.jobs import Wire
from moebus.producers.routing.process.config import ChildConfig
from moebus.producers.routing.process.place import Place, open_place
from moebus.producers.routing.process.sender import ProcessSender
from moebus.producers.routing.process.spawn import ChildProcess
from moebus.producers.routing.publisher import MakeSender, Mode, RoutingPublisher
from moebus.producers.routing.sender import Sender
from moebus.producers.routing.stats import Counters
from moebus.schemas.errors import SettingsError
from moebus.schemas.model_card import ModelCard

_log = get_logger(__name__)


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
    broker = open_broker(found.kafka)  # refuses wrong settings here, also where the child opens its own
    place = _place(mode or found.publisher.mode, found.publisher)
    if place is not None:
        broker.close()
    return kind(
        None if place is not None else broker,
        Topics(found.topic_prefix),
        run=run or found.run,
        card=card,
        epoch=epoch,
        options=found.publisher,
        metrics=metrics,
        owns_broker=place is None,
        make_sender=None if place is None else _process(place, found),
        on_high_water=on_high_water,
    )


def _place(mode: Mode, options: PublisherSettings) -> Place | None:
    """The journal of a process of its own; None for a thread."""
    if mode == "thread":
        return None
    try:
        if not sys.platform.startswith("linux") or not _is_python(sys.executable):
            raise SettingsError("publisher.mode: process needs Linux and a Python that can be started; use thread")
        return open_place(options.journal, options.max_bytes, SystemClock())
    except SettingsError as exc:
        if mode == "process" or options.journal is not None or options.max_bytes is not None:
            raise  # asked for by name
        _log.warning("routes.thread", f"routes are sent from a thread of this process: {exc}")
        return None


def _is_python(program: str) -> bool:
    """False where Python is built into another program, which would be started once more."""
    return os.path.basename(program).startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _process(place: Place, settings: Settings) -> MakeSender:
    def make(
        wire: Wire,
        options: PublisherSettings,
        clock: Clock,
        metrics: Metrics,
        counters: Counters,
        on_used: Callable[[int], None],
    ) -> Sender:
        config = ChildConfig.of(settings, options, wire).dump()
        return ProcessSender(
            place,
            lambda: ChildProcess(place.fd, place.journal.owner, config),
            options,
            clock,
            metrics,
            counters,
            on_used,
        )

    return make
