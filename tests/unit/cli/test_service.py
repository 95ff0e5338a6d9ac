"""What every process has: the address that it hands on to its work."""

from __future__ import annotations

import signal

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import Broker
from moebus.broker.topics import Topics, ensure
from moebus.cli import _service
from moebus.cli._service import Service
from moebus.observability.settings import load_settings


class Ends:
    """Work that fails at once."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def failure(self) -> tuple[int, str] | None:
        return 7, "it ends"


@pytest.mark.parametrize(
    ("url", "begins"), [(None, "http://127.0.0.1:"), ("http://10.0.0.7:9102", "http://10.0.0.7:9102")]
)
def test_members_announce_where_others_reach_the_page(
    url: str | None, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MemoryBroker()
    ensure(broker.admin(), Topics("t"))
    monkeypatch.setattr(_service, "open_broker", lambda _: broker)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    told: list[str] = []

    def make(_: Broker, address: str) -> Ends:
        told.append(address)
        return Ends()

    settings = load_settings(topic_prefix="t", http={"host": "0.0.0.0", "url": url})
    assert Service("store", settings).run(make) == 7
    assert len(told) == 1
    assert told[0].startswith(begins)
