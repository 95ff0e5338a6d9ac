"""Where the cluster is, and the settings every client of ours runs with (measured on Kafka 4.4)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moebus.broker.kafka.selector import QuickSelector
from moebus.schemas.errors import SettingsError

if TYPE_CHECKING:
    from moebus.observability.settings import KafkaSettings

Options = dict[str, object]
"""Keyword arguments of a kafka-python client."""

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^\s:,\[\]]+)(:\d{1,5})?")
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """Bootstrap servers (`host:port`, comma-separated) and security, as Kafka names them. Paths to PEM files.

    `connect_timeout`: seconds that one attempt to reach the cluster may take. `request_timeout`: seconds after which
    a request without an answer is sent again over a new connection.

    Raises:
        SettingsError: naming the setting.
    """

    bootstrap_servers: str = "127.0.0.1:9092"
    security_protocol: str | None = None
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    connect_timeout: float = 10.0
    request_timeout: float = 5.0

    def __post_init__(self) -> None:
        for server in self.bootstrap_servers.split(","):
            if not _ADDRESS.fullmatch(server.strip()):
                raise SettingsError(f"kafka.bootstrap_servers: {server.strip()!r} is not host:port")
        if self.security_protocol is not None and self.security_protocol not in _PROTOCOLS:
            raise SettingsError(
                f"kafka.security_protocol: {self.security_protocol!r} is none of {', '.join(_PROTOCOLS)}"
            )
        if (self.security_protocol or "").startswith("SASL") and self.sasl_mechanism is None:
            raise SettingsError(f"kafka.sasl_mechanism: needed with security_protocol {self.security_protocol}")

    @classmethod
    def of(cls, where: KafkaSettings | KafkaConfig | str) -> KafkaConfig:
        """From an address, from settings (secrets are unwrapped), or `where` itself."""
        if isinstance(where, KafkaConfig):
            return where
        if isinstance(where, str):
            return cls(where)
        return cls(
            bootstrap_servers=where.bootstrap_servers,
            security_protocol=where.security_protocol,
            sasl_mechanism=where.sasl_mechanism,
            sasl_username=where.sasl_username,
            sasl_password=None if where.sasl_password is None else where.sasl_password.get_secret_value(),
            ssl_cafile=_path(where.ssl_cafile),
            ssl_certfile=_path(where.ssl_certfile),
            ssl_keyfile=_path(where.ssl_keyfile),
        )

    def check_files(self) -> None:
        """Raises SettingsError for a certificate or key that is not there: the client would only say "no such file"."""
        for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise SettingsError(f"kafka.{name}: there is no file {path}")

    def security(self) -> Options:
        """What is passed through to every client; settings that are not given keep the client's defaults."""
        given: Options = {
            "security_protocol": self.security_protocol,
            "sasl_mechanism": self.sasl_mechanism,
            "sasl_plain_username": self.sasl_username,
            "sasl_plain_password": self.sasl_password,
            "ssl_cafile": self.ssl_cafile,
            "ssl_certfile": self.ssl_certfile,
            "ssl_keyfile": self.ssl_keyfile,
        }
        return {name: value for name, value in given.items() if value is not None}

    def client(self, name: str) -> Options:
        """Settings of every client. `name` becomes the client id."""
        return {
            "bootstrap_servers": [server.strip() for server in self.bootstrap_servers.split(",")],
            "client_id": name,
            "reconnect_backoff_max_ms": 1000,
            "selector": QuickSelector,
            **self.security(),
        }


def _path(value: os.PathLike[str] | None) -> str | None:
    return None if value is None else os.fspath(value)


def producer_options(request_timeout: float) -> Options:
    """For the writer, which sees to deadlines itself: a producer that gives a batch up never works again."""
    return {
        "acks": "all",
        "enable_idempotence": True,
        "linger_ms": 0,
        "batch_size": 950_000,
        "max_request_size": 1_000_000,
        "request_timeout_ms": int(request_timeout * 1000),
        "delivery_timeout_ms": 86_400_000,
        # Only a topic's first metadata waits for this, and a topic that is missing must not hold up the others.
        "max_block_ms": 500,
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
    }


def reader_options(max_wait: float, request_timeout: float) -> Options:
    """For readers by manual assignment. `max_wait`: seconds a fetch may wait at the broker."""
    wait_ms = int(max_wait * 1000)
    return {
        "auto_offset_reset": "none",
        "enable_auto_commit": False,
        "fetch_min_bytes": 1,
        "fetch_max_wait_ms": wait_ms,
        "request_timeout_ms": int(request_timeout * 1000) + max(1_000, wait_ms),
        "max_partition_fetch_bytes": 8 << 20,
        "fetch_max_bytes": 32 << 20,
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
    }


def group_options(group: str, session_timeout: float, request_timeout: float) -> Options:
    """For a group member. `session_timeout`: seconds (a stock broker takes 6 and more)."""
    session_ms = int(session_timeout * 1000)
    return {
        **reader_options(0.5, request_timeout),
        "group_id": group,
        "session_timeout_ms": session_ms,
        "heartbeat_interval_ms": min(3_000, session_ms // 3),
    }
