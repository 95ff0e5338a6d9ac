"""One broadcast command and its answers from 1,000 simulated workers, beside a raw echo by the same client.

`python bench/bench_control_fleet.py [--workers 1000] [--processes 4] [--commands 10000]`

The echo appends one record and reads as many small ones back as there are workers, from as many processes, without
states, identities or decisions: what the log alone costs. Then many commands go to a small fleet, to see whether
memory stays flat. It starts a Kafka of its own and ends it; nothing is asserted on time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.ports import Broker, OutRecord, TopicPartition
from moebus.broker.topics import Topics, ensure
from moebus.producers.control import ControlClient

ROUNDS = 5


def rss_mib(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def processes(kind: str, bootstrap: str, prefix: str, workers: int, count: int) -> Iterator[list[int]]:
    """`count` processes that share `workers`; their pids. All serve when this is entered."""
    script = str(Path(__file__).parent / "fleet_host.py")
    shares = [workers * n // count for n in range(count + 1)]
    started = [
        subprocess.Popen(
            [sys.executable, script, kind, bootstrap, prefix, str(first), str(last - first)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for first, last in pairwise(shares)
    ]  # fmt: skip
    try:
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline().strip() == b"ready", "a process ended before it served"
        yield [one.pid for one in started]
    finally:
        for one in started:
            one.communicate(timeout=60)


def measured(call: Callable[[], None]) -> list[float]:
    """Seconds of each of `ROUNDS` calls, after one to warm up."""
    call()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def fleet(broker: Broker, bootstrap: str, prefix: str, workers: int, count: int) -> list[float]:
    """Seconds from the call to the last answer of `pause` and `resume` in turn."""
    started = time.perf_counter()
    with processes("fleet", bootstrap, prefix, workers, count), ControlClient(broker, Topics(prefix)) as control:
        while sum(view.live and view.state.ready for view in control.workers()) < workers:
            time.sleep(0.5)
        print(f"{workers} workers in {count} processes were ready after {time.perf_counter() - started:.1f} s")
        modes = iter(["pause", "resume"] * ROUNDS)

        def ask() -> None:
            outcome = control.call(next(modes), timeout=120)
            assert len(outcome.responses) == workers, outcome.sentence()

        return measured(ask)


def echo(broker: Broker, bootstrap: str, prefix: str, workers: int, count: int) -> list[float]:
    """Seconds from the append to the last echo."""
    asked, answered = (f"{prefix}.echo.{name}" for name in ("requests", "responses"))
    admin = broker.admin()
    for topic in (asked, answered):
        admin.create(topic, partitions=1, replication=1, config={"message.timestamp.type": "LogAppendTime"}, timeout=30)
    admin.close()
    with processes("echo", bootstrap, prefix, workers, count):
        writer, reader = broker.writer("client"), broker.reader("client")
        reader.assign({TopicPartition(answered, 0): 0})

        def ask() -> None:
            key = uuid.uuid4().bytes
            writer.append(OutRecord(asked, key)).result(30)
            left = workers
            while left:
                left -= sum(record.key == key for record in reader.poll(1.0, 5000))

        seconds = measured(ask)
        reader.close()
        writer.close(1.0)
        return seconds


def memory(broker: Broker, bootstrap: str, prefix: str, commands: int) -> list[tuple[int, float, float]]:
    """(commands so far, MiB of a process of 4 workers, MiB of this one)."""
    points = []
    with processes("fleet", bootstrap, prefix, 4, 1) as pids, ControlClient(broker, Topics(prefix)) as control:
        while sum(view.live and view.state.ready for view in control.workers()) < 4:
            time.sleep(0.2)
        for number in range(commands + 1):
            if number % max(1, commands // 5) == 0:
                points.append((number, rss_mib(pids[0]), rss_mib()))
            if number < commands:
                assert control.call("pause" if number % 2 == 0 else "resume").ok
    return points


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, default=1000)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--commands", type=int, default=10_000)
    given = options.parse_args()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = stack.enter_context(LocalCluster.start(Path(directory), die_with_parent=True))
        broker = open_broker(cluster.bootstrap)
        stack.callback(broker.close)
        for prefix in ("fleet", "small"):
            admin = broker.admin()
            ensure(admin, Topics(prefix))
            admin.close()
        asked = fleet(broker, cluster.bootstrap, "fleet", given.workers, given.processes)
        raw = echo(broker, cluster.bootstrap, "fleet", given.workers, given.processes)
        ours, peer = statistics.median(asked), statistics.median(raw)
        print(f"{'':24}{'median':>10}{'slowest':>10}")
        print(f"{'command, all answers':24}{ours * 1000:>7.0f} ms{max(asked) * 1000:>7.0f} ms")
        print(f"{'raw echo':24}{peer * 1000:>7.0f} ms{max(raw) * 1000:>7.0f} ms")
        print(f"{'ratio':24}{ours / peer:>10.1f}")
        print(f"\n{'commands':>10}{'workers MiB':>14}{'client MiB':>14}")
        for number, workers, client in memory(broker, cluster.bootstrap, "small", given.commands):
            print(f"{number:>10}{workers:>14.1f}{client:>14.1f}")


if __name__ == "__main__":
    main()
