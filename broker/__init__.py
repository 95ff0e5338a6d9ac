"""The log: ports, adapters (Kafka, in memory), topic definitions. The only package that imports a Kafka client.

Users start from `open_broker`; everything they get is one of the ports in `moebus.broker.ports`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebus.broker.errors import (
    AdminRefused,
    AppendFailed,
    AppendUnknown,
    BrokerUnavailable,
    OffsetOutOfRange,
    PartitionLost,
    RecordTooLarge,
    TopicMissing,
    WriterClosed,
)
from moebus.broker.ports import (
    Broker,
    GroupListener,
    GroupReader,
    LogAdmin,
    LogReader,
    LogRecord,
    LogWriter,
    OutRecord,
    Position,
    Receipt,
    TopicInfo,
    TopicPartition,
)
from moebus.broker.topics import Topics

if TYPE_CHECKING:
    from moebus.broker.kafka.config import KafkaConfig
    from moebus.observability.settings import KafkaSettings


def open_broker(where: KafkaSettings | KafkaConfig | str) -> Broker:
    """The Kafka cluster at `where`: settings, a config, or `host:port[,host:port]` without security.

    A `moebus.broker.kafka.KafkaConfig` holds what settings hold, without pydantic.
    Does not connect: without a broker, writers and readers wait for one, admin calls raise BrokerUnavailable.

    Raises:
        SettingsError: naming the setting that is not usable.
    """
    from moebus.broker.kafka.broker import KafkaBroker
    from moebus.broker.kafka.config import KafkaConfig

    return KafkaBroker(KafkaConfig.of(where))


__all__ = [
    "AdminRefused",
    "AppendFailed",
    "AppendUnknown",
    "Broker",
    "BrokerUnavailable",
    "GroupListener",
    "GroupReader",
    "LogAdmin",
    "LogReader",
    "LogRecord",
    "LogWriter",
    "OffsetOutOfRange",
    "OutRecord",
    "PartitionLost",
    "Position",
    "Receipt",
    "RecordTooLarge",
    "TopicInfo",
    "TopicMissing",
    "TopicPartition",
    "Topics",
    "WriterClosed",
    "open_broker",
]
