"""A process of the fleet benchmark: many simulated workers on one reader and one writer, or as many raw echoes.

`python bench/fleet_host.py fleet|echo BOOTSTRAP PREFIX FIRST COUNT`; prints `ready` once it serves and ends with its
stdin.
"""

from __future__ import annotations

import sys
import threading

from moebus.broker import open_broker
from moebus.broker.ports import Broker, OutRecord, TopicPartition
from moebus.broker.topics import Topics
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.simulated import SimulatedEngine
from moebus.observability.health import Health


def serve_fleet(broker: Broker, prefix: str, first: int, count: int, ended: threading.Event) -> None:
    specs = [WorkerSpec(f"w{n:04}", SimulatedEngine(), {"role": "rollout"}) for n in range(first, first + count)]
    health = Health()
    host = ControlWorkerHost(broker, Topics(prefix), specs, health=health).start()
    while health.ready() and host.alive and not ended.wait(0.05):
        pass
    print("ready", flush=True)
    ended.wait()
    host.stop()


def serve_echo(broker: Broker, prefix: str, first: int, count: int, ended: threading.Event) -> None:
    """Each request is answered `count` times, by small records without any meaning."""
    asked, answered = (f"{prefix}.echo.{name}" for name in ("requests", "responses"))
    reader, writer = broker.reader("echo"), broker.writer("echo")
    tp = TopicPartition(asked, 0)
    admin = broker.admin()
    reader.assign(admin.end_offsets([tp]))
    admin.close()
    print("ready", flush=True)
    while not ended.is_set():
        for record in reader.poll(0.2):
            for number in range(first, first + count):
                writer.append(OutRecord(answered, b"%d" % number, record.value))
    reader.close()
    writer.close(1.0)


def main() -> None:
    kind, bootstrap, prefix, first, count = sys.argv[1:]
    ended = threading.Event()
    serve = serve_fleet if kind == "fleet" else serve_echo

    def watch() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    broker = open_broker(bootstrap)
    try:
        serve(broker, prefix, int(first), int(count), ended)
    finally:
        broker.close()


if __name__ == "__main__":
    main()
