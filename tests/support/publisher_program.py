"""A program that publishes, to be killed: `python -m tests.support.publisher_program MODE BOOTSTRAP PREFIX JOURNAL N`.

`hold`: submits N rollouts, prints one line `pid of the child`, and lives until it is killed. `daemonic`: the same from
a daemonic process of `multiprocessing`, and waits for the receipts. `leave`: submits and ends without `close`.
`default`: a journal of the default size; prints who sends and its limit, and waits for the receipts. `full`: prints
`connected`, waits for a line, submits until N were dropped, prints how many bytes it and its child use more than it
did before, and its bound, and at last how many were submitted, stored and dropped.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from pathlib import Path

from moebus.observability.settings import KafkaSettings, PublisherSettings, Settings
from moebus.producers.routing import RoutingPublisher
from moebus.producers.routing.process.sender import ProcessSender
from moebus.schemas.model_card import ModelCard
from tests.support.routes import make_routes

RUN = "run"
CARD = ModelCard(num_experts=384, top_k=8, moe_layers=tuple(range(1, 13)))
JOURNAL_BYTES = 16 << 20


def rows_of(number: int) -> int:
    """Rows of rollout `number`: the larger ones take several chunks."""
    return 100 + 1500 * (number % 5)


def settings(bootstrap: str, prefix: str, journal: Path | None, **options: object) -> Settings:
    defaults = {"journal": journal, "max_bytes": JOURNAL_BYTES, "block_seconds": 90}
    publisher = PublisherSettings.model_validate({**defaults, **options})
    return Settings(kafka=KafkaSettings(bootstrap_servers=bootstrap), topic_prefix=prefix, run=RUN, publisher=publisher)


def publisher(found: Settings, **arguments: object) -> RoutingPublisher:
    return RoutingPublisher.from_settings(card=CARD, settings=found, mode="process", **arguments)  # type: ignore[arg-type]


def child_pid(made: RoutingPublisher) -> int | None:
    """Of the process that sends now."""
    sender = made._sender
    assert isinstance(sender, ProcessSender)
    return sender.child_pid


def submit(made: RoutingPublisher, numbers: range) -> list[str]:
    """The attempts, in order; rollout n has rows of its own."""
    return [made.submit(make_routes(rows_of(n), CARD, seed=n), f"r{n}").ref.attempt for n in numbers]


def _publish_and_wait(bootstrap: str, prefix: str, count: int) -> None:
    with publisher(settings(bootstrap, prefix, None)) as made:
        submit(made, range(count))
        assert made.flush(60)


def _pss(pid: int) -> int:
    """Bytes that a process uses, shared pages by their share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _fill(bootstrap: str, prefix: str, drops: int) -> None:
    routes, bound = make_routes(rows_of(4), CARD, seed=4), 24 << 20
    before = _pss(os.getpid())
    with publisher(settings(bootstrap, prefix, None, max_bytes=bound, full="drop")) as made:
        made.submit(routes, "first").result(60)
        sys.stdout.write("connected\n")
        sys.stdout.flush()
        sys.stdin.readline()
        while (dropped := made.stats().dropped) < drops:
            made.submit(routes, f"r{made.stats().submitted}")
            threading.Event().wait(0.01)  # the child gets to work meanwhile
        child = child_pid(made)
        assert child is not None
        sys.stdout.write(f"{_pss(os.getpid()) - before + _pss(child)} {bound}\n")
        sys.stdout.flush()
        assert not made.flush(90), "what was dropped is told"
        sys.stdout.write(f"{made.stats().submitted} {made.stats().stored} {dropped}\n")


def main(mode: str, bootstrap: str, prefix: str, journal: str, count: str) -> None:
    if mode == "daemonic":
        arguments = (bootstrap, prefix, int(count))
        process = multiprocessing.get_context("spawn").Process(target=_publish_and_wait, args=arguments, daemon=True)
        process.start()
        process.join(90)
        sys.exit(process.exitcode)
    if mode == "full":
        _fill(bootstrap, prefix, int(count))
        return
    if mode == "default":
        with publisher(settings(bootstrap, prefix, None, max_bytes=None)) as made:
            sys.stdout.write(f"{type(made._sender).__name__} {made._sender.limit}\n")
            submit(made, range(int(count)))
            assert made.flush(90)
        return
    made = publisher(settings(bootstrap, prefix, Path(journal) if journal != "-" else None))
    submit(made, range(int(count)))
    while child_pid(made) is None:
        threading.Event().wait(0.01)
    sys.stdout.write(f"{child_pid(made)}\n")
    sys.stdout.flush()
    if mode == "hold":
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
