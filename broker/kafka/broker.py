"""Broker on Apache Kafka through kafka-python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from moebus.broker.kafka.admin import KafkaAdmin
from moebus.broker.kafka.config import KafkaConfig
from moebus.broker.kafka.group import KafkaGroupReader
from moebus.broker.kafka.reader import KafkaReader
from moebus.broker.kafka.writer import KafkaWriter
from moebus.broker.ports import GroupListener

_Made = KafkaWriter | KafkaReader | KafkaGroupReader | KafkaAdmin


class KafkaBroker:
    """See `Broker`. Nothing here fails because no broker is up. SettingsError: a certificate's file is missing."""

    def __init__(self, config: KafkaConfig) -> None:
        config.check_files()
        self._config = config
        self._lock = threading.Lock()
        self._made: list[_Made] = []

    def writer(
        self, name: str, *, receipt_timeout: float = 120.0, on_rebuild: Callable[[str], None] | None = None
    ) -> KafkaWriter:
        writer = KafkaWriter(self._config, name, receipt_timeout, on_rebuild)
        self._keep(writer)
        return writer

    def reader(self, name: str, *, max_wait: float = 0.5) -> KafkaReader:
        reader = KafkaReader(self._config, name, max_wait)
        self._keep(reader)
        return reader

    def group_reader(
        self,
        name: str,
        group: str,
        topics: Sequence[str],
        *,
        listener: GroupListener | None = None,
        session_timeout: float = 10.0,
    ) -> KafkaGroupReader:
        reader = KafkaGroupReader(self._config, name, group, topics, listener, session_timeout)
        self._keep(reader)
        return reader

    def admin(self) -> KafkaAdmin:
        admin = KafkaAdmin(self._config)
        self._keep(admin)
        return admin

    def _keep(self, one: _Made) -> None:
        with self._lock:
            self._made = [made for made in self._made if not made.closed]
            self._made.append(one)

    def close(self) -> None:
        with self._lock:
            made, self._made = self._made, []
        for one in made:
            if isinstance(one, KafkaWriter):
                one.close(0)
            else:
                one.close()
