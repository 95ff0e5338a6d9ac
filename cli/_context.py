"""What every command starts from: settings, logs, a broker that answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from moebus.broker import open_broker
from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.observability.log import configure_logging
from moebus.observability.settings import KafkaSettings, Settings, load_settings

BROKER_SECONDS = 6.0
"""How long a command waits for a broker before it ends with exit code 5; with its start-up within 15 s."""

_ADDRESS = "MOEBUS_KAFKA__BOOTSTRAP_SERVERS"


@dataclass(frozen=True, slots=True)
class Globals:
    """The options in front of the command's name."""

    config: Path | None = None
    bootstrap: str | None = None
    prefix: str | None = None
    log_format: str | None = None
    log_level: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """An open broker and the names of this fleet's topics."""

    settings: Settings
    broker: Broker
    topics: Topics


def settings_of(ctx: typer.Context, *, service: bool = False) -> Settings:
    """Settings with the global options over them; sets up the logs.

    Commands log warnings as text, services log everything as JSON, unless told otherwise.
    """
    given = ctx.obj if isinstance(ctx.obj, Globals) else Globals()
    # Options win over the environment and the file: they are put where settings look first.
    overrides: dict[str, object] = {}
    if given.bootstrap:
        overrides["kafka"] = {"bootstrap_servers": given.bootstrap}
    if given.prefix:
        overrides["topic_prefix"] = given.prefix
    log = {k: v for k, v in (("format", given.log_format), ("level", given.log_level)) if v}
    if log:
        overrides["log"] = log
    if not service:
        configure_logging(given.log_level or os.environ.get("MOEBUS_LOG__LEVEL", "WARNING"), "text")
    settings = load_settings(given.config, **overrides)
    if service:
        configure_logging(settings.log.level, settings.log.format)
    return settings


def broker_named(ctx: typer.Context, settings: Settings) -> bool:
    """Whether the user named a broker, be it the address that is the default anyway."""
    given = ctx.obj.bootstrap if isinstance(ctx.obj, Globals) else None
    default = KafkaSettings().bootstrap_servers
    return bool(given or os.environ.get(_ADDRESS) or settings.kafka.bootstrap_servers != default)


def connect(settings: Settings) -> Broker:
    """A broker that nobody has asked anything yet; to be closed."""
    return open_broker(settings.kafka)


@contextmanager
def session(ctx: typer.Context, *, check: bool = True) -> Iterator[Session]:
    """A broker for one command.

    Raises:
        BrokerUnavailable: nothing answered within 6 s (exit code 5).  SettingsError: naming the setting.
    """
    settings = settings_of(ctx)
    broker = open_broker(settings.kafka)
    try:
        if check:
            admin = broker.admin()
            admin.cluster_id(BROKER_SECONDS)
            admin.close()
        yield Session(settings, broker, Topics(settings.topic_prefix))
    finally:
        broker.close()
