"""murmur2 as Java has it, checked against kafka-python's own and against values printed by Java."""

from __future__ import annotations

import random

from moebus.broker.partitioner import murmur2, partition_for
from tests.contract.write_suite import JAVA_MURMUR2


def test_values_of_java() -> None:
    signed = {key: murmur2(key) - (1 << 32) * (murmur2(key) >> 31) for key in JAVA_MURMUR2}
    assert signed == JAVA_MURMUR2


def test_same_as_the_client_has_it() -> None:
    import moebus.broker.kafka  # noqa: F401, I001  # first: it silences the client's own deprecation warnings
    from kafka.partitioner.default import murmur2 as theirs

    rng = random.Random(7)
    for length in range(40):
        key = rng.randbytes(length)
        assert murmur2(key) == theirs(key) & 0xFFFFFFFF


def test_partitions_are_in_range_and_used() -> None:
    found = [partition_for(b"%d" % n, 8) for n in range(400)]
    assert set(found) == set(range(8))
    assert max(found.count(number) for number in range(8)) < 100
