"""The program that the child of a `RoutingPublisher` runs; `spawn` starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

from moebus.broker import open_broker
from moebus.observability.clock import SystemClock
from moebus.observability.log import configure_logging, get_logger
from moebus.observability.memory import keep_memory
from moebus.producers.routing.process.child import Child
from moebus.producers.routing.process.config import ChildConfig
from moebus.producers.routing.process.journal import Journal
from moebus.producers.routing.process.locks import child_may_start

_KEEP_BYTES = 16 << 20
_log = get_logger(__name__)


def main(arguments: list[str]) -> int:
    """`arguments`: three inherited descriptors (journal, bell, acks), the publisher's process id and its mark in the
    journal; the rest comes on standard input.

    Exit code 0: all in the journal is settled; 1: something was left in it, by name in the log; 2: the journal is
    another publisher's by now.
    """
    told_to_end = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the publisher decides when to end, and its end ends this
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    with contextlib.suppress(OSError, AttributeError):  # being woken must not push the publisher's thread off its core
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    journal_fd, bell, acks, parent = (int(argument) for argument in arguments[:4])
    keep_memory(_KEEP_BYTES)
    config = ChildConfig.load(sys.stdin.buffer.readline())
    configure_logging(config.log_level, "text" if config.log_format == "text" else "json")
    journal, clock = Journal(journal_fd), SystemClock()
    if not child_may_start(journal_fd, journal, bytes.fromhex(arguments[4]), clock):
        return 2
    broker = open_broker(config.kafka_config)
    child = Child(
        journal, bell, acks, broker, config.wire, clock,
        receipt_timeout=config.receipt_timeout, orphan_seconds=config.orphan_seconds,
        parent_alive=lambda: os.getppid() == parent, told_to_end=told_to_end,
    )  # fmt: skip
    left = child.run()
    if left:
        text = f"{len(left)} rollouts or fences are unsent: {', '.join(left[:20])}{', ...' if len(left) > 20 else ''}"
        _log.error("routes.unsent", text, count=len(left))
    return 1 if left else 0
