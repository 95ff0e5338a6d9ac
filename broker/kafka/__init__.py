"""The log on Apache Kafka, through kafka-python. Nothing outside this package imports a Kafka client."""

import logging
import warnings

with warnings.catch_warnings():
    # kafka-python reads its message definitions in a way that Python 3.11 and 3.12 call deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka  # noqa: F401

from moebus.broker.kafka.config import KafkaConfig

# An outage makes kafka-python log several lines a second; without a handler of the application's they would go to
# stderr. What a user has to know, the adapter logs itself, once.
logging.getLogger("kafka").addHandler(logging.NullHandler())

__all__ = ["KafkaConfig"]
