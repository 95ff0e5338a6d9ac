"""One process at a time: an advisory lock on a file, released by the kernel when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moebus.broker.local.errors import LocalKafkaError


@contextmanager
def file_lock(path: Path, timeout: float = 600.0) -> Iterator[None]:
    """Holds an exclusive lock on `path` (made if absent, never deleted).

    Raises:
        LocalKafkaError: another process held it for `timeout` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LocalKafkaError(
                        f"another process has held {path} for {timeout:.0f} s; end it or wait for it"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
