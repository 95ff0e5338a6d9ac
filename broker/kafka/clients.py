"""Making kafka-python's clients: a failed attempt leaves nothing behind and says why it failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError, KafkaTimeoutError
from kafka.net.compat import KafkaNetClient
from kafka.serializer import Serializer

from moebus.broker.errors import BrokerUnavailable
from moebus.broker.kafka import frames, lenient
from moebus.broker.kafka.config import KafkaConfig, Options, producer_options
from moebus.broker.kafka.faults import describe
from moebus.broker.kafka.mending import fetch_together
from moebus.broker.kafka.reasons import Reasons
from moebus.broker.kafka.sockets import DIRECT, tls_context

T = TypeVar("T")
GiveUp = Callable[[], bool]
_STEP_MS = 100


def never() -> bool:
    return False


# kafka-python's classes are untyped.
Producer: TypeAlias = Any
Consumer: TypeAlias = Any
Admin: TypeAlias = Any


def make_producer(config: KafkaConfig, name: str, timeout: float, give_up: GiveUp = never) -> Producer:
    """A connected, idempotent producer.

    Raises:
        BrokerUnavailable: not connected within `timeout` seconds, or `give_up()` became true.
    """
    options = {**config.client(name), **producer_options(config.request_timeout), "value_serializer": NULL_VALUE}
    return _connected(KafkaProducer, options, config, timeout, give_up)


def make_consumer(
    config: KafkaConfig, name: str, options: Options, timeout: float, give_up: GiveUp = never
) -> Consumer:
    """A connected consumer that reads bytes and never commits by itself. Raises as `make_producer`."""
    lenient.install()
    frames.install()
    consumer: Consumer = _connected(KafkaConsumer, {**config.client(name), **options}, config, timeout, give_up)
    fetch_together(consumer)
    return consumer


def make_admin(config: KafkaConfig, timeout: float) -> Admin:
    """A connected admin client. Raises as `make_producer`."""
    options = {**config.client("moebus-admin"), "request_timeout_ms": int(config.request_timeout * 1000)}
    return _connected(KafkaAdminClient, options, config, timeout, never)


def _connected(kind: Callable[..., T], options: Options, config: KafkaConfig, timeout: float, give_up: GiveUp) -> T:
    options = {**options, "proxy_url": DIRECT}
    reasons = Reasons()
    made: list[Any] = []

    def net_client(**settings: object) -> Any:
        made.append(KafkaNetClient(**settings))
        _bootstrap(made[0], timeout, give_up)
        return made[0]

    try:
        if config.security_protocol in ("SSL", "SASL_SSL"):
            options["ssl_context"] = tls_context(config.ssl_cafile, config.ssl_certfile, config.ssl_keyfile)
        return kind(**options, kafka_client=net_client, bootstrap_timeout_ms=max(1, int(timeout * 1000)))
    except (KafkaError, OSError, RuntimeError, ValueError) as exc:
        # The constructor leaves its sockets (and its thread, if it had started one) behind.
        for client in made:
            with contextlib.suppress(Exception):
                client.close()
        raise unavailable(config, timeout, reasons.text() or describe(exc)) from exc


def _bootstrap(client: Any, timeout: float, give_up: GiveUp) -> None:
    """What the constructors would do by themselves, but so that it can be given up half-way."""
    future = client._manager.bootstrap_async(timeout * 1000)
    deadline = time.monotonic() + timeout
    while not future.is_done and time.monotonic() < deadline and not give_up():
        client.poll(timeout_ms=_STEP_MS, future=future)
    if future.failed():
        raise future.exception
    if not future.is_done:
        raise KafkaTimeoutError("given up" if give_up() else "no answer")


def unavailable(config: KafkaConfig, timeout: float, reason: str) -> BrokerUnavailable:
    """The error of a call that nobody answered in time."""
    return BrokerUnavailable(
        f"no Kafka broker answered at {config.bootstrap_servers} within {timeout:.3g} s ({reason}): "
        "start one with `moebus broker up`, or check kafka.bootstrap_servers and the security settings"
    )


class _NullValue(Serializer):  # type: ignore[misc]
    """kafka-python refuses a record without key and value; this stands for the value until it is serialised."""

    def serialize(self, topic: str, headers: object, data: object) -> object:
        return None if data is self else data


NULL_VALUE = _NullValue()
