"""The next fetch is sent before records are handed out, and its faults lose none of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moebus.broker.kafka.config import KafkaConfig
from moebus.broker.kafka.reader import KafkaReader
from moebus.broker.ports import TopicPartition


class Client:
    """A consumer with one record; its next fetch fails."""

    def __init__(self) -> None:
        self.asked = 0
        self.left: list[Any] = [SimpleNamespace(
            topic="t", partition=0, offset=4, timestamp=1, key=None, value=b"v", headers=[],
            next_offset=5, leader_epoch=0,
        )]  # fmt: skip
        self._fetcher = SimpleNamespace(send_fetches=self._fetch, _next_partition_records=None)
        self._subscription = SimpleNamespace(assignment={})

    def _fetch(self) -> None:
        self.asked += 1
        raise RuntimeError("the connection is gone")

    def poll(self, timeout_ms: float, max_records: int) -> dict[str, list[Any]]:
        found, self.left = self.left, []
        return {"t-0": found} if found else {}

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: None


def test_a_fetch_ahead_that_fails_loses_nothing() -> None:
    client = Client()
    reader = KafkaReader(KafkaConfig(), "r")
    reader._connector = SimpleNamespace(get=lambda timeout: client, close=lambda: None)  # type: ignore[assignment]
    reader.assign({TopicPartition("t", 0): 4})
    assert [(one.offset, one.value) for one in reader.poll(1.0)] == [(4, b"v")]
    assert client.asked == 1
    assert reader.poll(0.0) == []
    assert client.asked == 1  # the client asks by itself when it waits
    reader.close()
