"""The log on Apache Kafka, through kafka-python. Importing this package alone imports no Kafka client."""

from moebus.broker.kafka.config import KafkaConfig

__all__ = ["KafkaConfig"]
