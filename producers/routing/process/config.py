"""What the child has to know, as one line of JSON on its standard input: secrets are seen by nobody else there.

The child reads no settings: without them it starts in half the time and needs 12 MB less.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moebus.broker.kafka.config import KafkaConfig
from moebus.producers.routing.jobs import Wire

if TYPE_CHECKING:
    from moebus.observability.settings import PublisherSettings, Settings


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """Values of settings, unwrapped. `kafka`: fields of a `KafkaConfig`."""

    kafka: dict[str, Any]
    topic: str
    producer_id: str
    receipt_timeout: float
    orphan_seconds: float
    log_level: str
    log_format: str

    @classmethod
    def of(cls, settings: Settings, options: PublisherSettings, wire: Wire) -> ChildConfig:
        kafka = asdict(KafkaConfig.of(settings.kafka))
        log = settings.log
        return cls(
            kafka, wire.topic, wire.producer_id, options.receipt_timeout, options.orphan_seconds, log.level, log.format
        )

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> ChildConfig:
        return cls(**json.loads(line))

    @property
    def wire(self) -> Wire:
        return Wire(self.topic, self.producer_id)

    @property
    def kafka_config(self) -> KafkaConfig:
        return KafkaConfig(**self.kafka)
