"""LogAdmin on kafka-python: every call ends within its timeout, and says why when nobody answered."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec

from moebus.broker.errors import AdminRefused, TopicMissing
from moebus.broker.kafka.bounded import TookTooLong, bounded
from moebus.broker.kafka.clients import Admin, make_admin, unavailable
from moebus.broker.kafka.config import KafkaConfig
from moebus.broker.kafka.convert import to_kafka
from moebus.broker.kafka.faults import Backoff, describe
from moebus.broker.ports import TopicInfo, TopicPartition

T = TypeVar("T")
Call = Callable[[Admin, float], T]
"""A request: (client, time.monotonic deadline) -> answer."""


# UnknownBrokerIdError: the client has just lost its only connection and knows no broker at the moment.
_PASSING = (kafka_errors.RetriableError, kafka_errors.UnknownBrokerIdError, RuntimeError)


class KafkaAdmin:
    """See `LogAdmin`. Connects with its first call. Thread-safe; calls run one after the other."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._client: Admin | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether there is nothing to release; a call after `close` connects again."""
        return self._closed

    def cluster_id(self, timeout: float = 10.0) -> str:
        return str(self._ask(lambda client, _: client.describe_cluster(), timeout)["cluster_id"])

    def broker_count(self, timeout: float = 10.0) -> int:
        return len(self._ask(lambda client, _: client.describe_cluster(), timeout)["brokers"])

    def describe(self, names: Sequence[str], timeout: float = 10.0) -> dict[str, TopicInfo]:
        return self._ask(lambda client, _: _describe(client, list(names)), timeout)

    def create(
        self, name: str, *, partitions: int, replication: int, config: Mapping[str, str], timeout: float = 10.0
    ) -> bool:
        wanted = {name: {"num_partitions": partitions, "replication_factor": replication, "configs": dict(config)}}

        def call(client: Admin, deadline: float) -> bool:
            try:
                client.create_topics(wanted, timeout_ms=_left_ms(deadline))
                created = True
            except kafka_errors.TopicAlreadyExistsError:
                created = False
            client.wait_for_topics([name], timeout_ms=_left_ms(deadline))
            return created

        return self._ask(call, timeout)

    def set_config(self, name: str, config: Mapping[str, str], timeout: float = 10.0) -> None:
        def call(client: Admin, _: float) -> Any:
            if name not in _existing(client, [name]):
                raise TopicMissing(f"{name} does not exist: run `moebus topics ensure`")
            return client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, dict(config))])

        outcome = self._ask(call, timeout)["topic"][name]
        if outcome != "OK":  # errors come back as text
            raise AdminRefused(f"settings of topic {name}: {outcome}")

    def start_offsets(self, tps: Sequence[TopicPartition], timeout: float = 10.0) -> dict[TopicPartition, int]:
        return self._ask(lambda client, deadline: _offsets(client, tps, OffsetSpec.EARLIEST, deadline), timeout)

    def end_offsets(self, tps: Sequence[TopicPartition], timeout: float = 10.0) -> dict[TopicPartition, int]:
        return self._ask(lambda client, deadline: _offsets(client, tps, OffsetSpec.LATEST, deadline), timeout)

    def _ask(self, call: Call[T], timeout: float) -> T:
        """The answer to one request. A connection that broke, or a broker that asks for patience, is tried again until
        `timeout` seconds are over: a restart shorter than that costs time alone."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise unavailable(self._config, timeout, "an earlier request is still waiting")
        backoff = Backoff(0.05, 0.5)
        try:
            self._closed = False
            while True:
                try:
                    return self._once(call, deadline)
                except TookTooLong as exc:
                    self._drop()
                    raise unavailable(self._config, timeout, "connected, but a request was not answered") from exc
                except _PASSING as exc:
                    self._drop()
                    delay = backoff.next()
                    if time.monotonic() + delay >= deadline:
                        raise unavailable(self._config, timeout, describe(exc)) from exc
                    time.sleep(delay)
                except (kafka_errors.KafkaError, ValueError) as exc:
                    raise AdminRefused(f"the cluster refused a request: {describe(exc)}") from exc
        finally:
            self._lock.release()

    def _once(self, call: Call[T], deadline: float) -> T:
        if self._client is None:
            self._client = make_admin(self._config, max(0.1, deadline - time.monotonic()))
        client = self._client
        return bounded(lambda: call(client, deadline), max(0.1, deadline - time.monotonic()), "moebus-admin-call")

    def _drop(self) -> None:
        """Forgets the client; its closing may block, so it happens elsewhere."""
        client, self._client = self._client, None
        if client is not None:
            threading.Thread(target=_close, args=(client,), name="moebus-admin-close", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            self._closed = True
        if client is not None:
            _close(client)


def _close(client: Admin) -> None:
    with contextlib.suppress(Exception):
        client.close()


def _left_ms(deadline: float) -> int:
    return max(1, int((deadline - time.monotonic()) * 1000))


def _existing(client: Admin, names: list[str]) -> dict[str, Any]:
    """Topics by name; a missing one is answered with an error code, not raised."""
    found = client.describe_topics(names) if names else []
    return {topic["name"]: topic for topic in found if topic["error_code"] == 0}


def _describe(client: Admin, names: list[str]) -> dict[str, TopicInfo]:
    topics = _existing(client, names)
    if not topics:
        return {}
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in topics]
    configs = client.describe_configs(resources, config_filter="all")["topic"]
    return {
        name: TopicInfo(
            name=name,
            topic_id=str(topic["topic_id"]),
            partitions=len(topic["partitions"]),
            replication=min((len(p["replica_nodes"]) for p in topic["partitions"]), default=0),
            config={key: str(value["value"]) for key, value in configs[name].items() if value["value"] is not None},
        )
        for name, topic in topics.items()
    }


def _offsets(
    client: Admin, tps: Sequence[TopicPartition], spec: OffsetSpec, deadline: float
) -> dict[TopicPartition, int]:
    topics = _existing(client, sorted({tp.topic for tp in tps}))
    for tp in tps:
        if tp.topic not in topics or not 0 <= tp.partition < len(topics[tp.topic]["partitions"]):
            raise TopicMissing(f"{tp} does not exist: run `moebus topics ensure`")
    if not tps:
        return {}
    found = client.list_partition_offsets({to_kafka(tp): spec for tp in tps}, timeout_ms=_left_ms(deadline))
    return {tp: int(found[to_kafka(tp)].offset) for tp in tps}
