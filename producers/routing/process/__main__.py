"""The child of a `RoutingPublisher`: `python -m moebus.producers.routing.process JOURNAL BELL ACKS PARENT`.

Started by the publisher alone: three inherited descriptors and its process id; the rest on standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys

from moebus.broker import open_broker
from moebus.observability.clock import SystemClock
from moebus.observability.log import configure_logging, get_logger
from moebus.producers.routing.process.child import Child
from moebus.producers.routing.process.config import ChildConfig
from moebus.producers.routing.process.journal import Journal
from moebus.producers.routing.process.place import CHILD_BYTE

_log = get_logger(__name__)


def main(arguments: list[str]) -> int:
    """Exit code 0: everything in the journal is settled; 1: something was left in it, by name in the log."""
    for quiet in (signal.SIGINT, signal.SIGTERM):  # the publisher decides when to end, and its end ends this
        signal.signal(quiet, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # being woken must not push the publisher's thread off its core
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    journal_fd, bell, acks, parent = (int(argument) for argument in arguments)
    config = ChildConfig.load(sys.stdin.buffer.readline())
    configure_logging(config.log_level, "text" if config.log_format == "text" else "json")
    with contextlib.suppress(OSError):  # a killed child that is not quite gone: both only repeat themselves
        fcntl.lockf(journal_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, CHILD_BYTE)
    broker = open_broker(config.kafka_settings)
    child = Child(
        Journal(journal_fd), bell, acks, broker, config.wire, SystemClock(),
        receipt_timeout=config.receipt_timeout, orphan_seconds=config.orphan_seconds,
        parent_alive=lambda: os.getppid() == parent,
    )  # fmt: skip
    left = child.run()
    if left:
        text = f"{len(left)} rollouts or fences are unsent: {', '.join(left[:20])}{', ...' if len(left) > 20 else ''}"
        _log.error("routes.unsent", text, count=len(left))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
