"""The peer of bench_routes.py: a raw kafka-python consumer that puts what it reads into LMDB, with fsync and no checks.

Run by bench_routes.py. After each commit it prints how many records it has. With a last argument `tuned` it uses the
sockets and frames of our own clients and keeps freed memory as our store does.
"""

from __future__ import annotations

import sys
from typing import Any

import lmdb
from kafka import KafkaConsumer, TopicPartition

from moebus.broker.kafka import frames
from moebus.broker.kafka.config import reader_options
from moebus.broker.kafka.selector import QuickSelector
from moebus.broker.kafka.sockets import DIRECT
from moebus.observability.memory import keep_memory

MAP_BYTES = 16 << 30


def main(bootstrap: str, topic: str, partitions: int, folder: str, tuned: bool = False) -> None:
    """Follows the topic from its start, for ever."""
    if tuned:
        keep_memory(64 << 20)
        frames.install()
    options = {**reader_options(0.5, 10.0), **({"proxy_url": DIRECT, "selector": QuickSelector} if tuned else {})}
    consumer: Any = KafkaConsumer(bootstrap_servers=[bootstrap], **options)
    tps = [TopicPartition(topic, number) for number in range(partitions)]
    consumer.assign(tps)
    for tp in tps:
        consumer.seek(tp, 0)
    env: Any = lmdb.open(folder, map_size=MAP_BYTES, writemap=False, sync=True)
    count = 0
    print("ready", flush=True)
    while True:
        found = consumer.poll(timeout_ms=200, max_records=64)
        if not found:
            continue
        with env.begin(write=True) as write:
            for tp, records in found.items():
                for record in records:
                    write.put(b"%d/%d" % (tp.partition, record.offset), record.value)
                    count += 1
        print(count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:] == ["tuned"])
