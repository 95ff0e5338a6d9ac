"""What the child has to know, as one line of JSON on its standard input: secrets are seen by nobody else there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from moebus.observability.settings import KafkaSettings, PublisherSettings, Settings
from moebus.producers.routing.jobs import Wire


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """Values of settings, unwrapped."""

    kafka: dict[str, Any]
    topic: str
    producer_id: str
    receipt_timeout: float
    orphan_seconds: float
    log_level: str
    log_format: str

    @classmethod
    def of(cls, settings: Settings, options: PublisherSettings, wire: Wire) -> ChildConfig:
        kafka = settings.kafka.model_dump(mode="json")
        if settings.kafka.sasl_password is not None:
            kafka["sasl_password"] = settings.kafka.sasl_password.get_secret_value()
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
    def kafka_settings(self) -> KafkaSettings:
        return KafkaSettings.model_validate(self.kafka)
