"""Entries that end the child each time it has them in hand: taken out of the way, so that the rest goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

from moebus.broker.errors import AppendFailed
from moebus.observability.log import get_logger
from moebus.producers.routing.process.journal import Journal

MAX_TRIES = 5
"""Ends of the child with an entry in hand. From the first on, the child takes that entry alone."""
_log = get_logger(__name__)


def set_aside(journal: Journal, position: int, seq: int, name: str, folder: Path) -> AppendFailed:
    """Keeps the bytes of an entry in a file of `folder` and says what happened, as the outcome of its receipt. The
    entry itself is left to the caller to settle."""
    text = f"{name}: entry {seq} of the journal ended the publisher's process {MAX_TRIES} times and is not tried again"
    entry = journal.entry(position, seq)
    try:
        assert entry is not None
        kept = f"its bytes are in {_keep(folder, f'entry-{int(time.time())}-{os.getpid()}-{seq}', journal.raw(entry))}"
    except OSError as exc:
        kept = f"its bytes could not be kept: {exc}"
    _log.error("routes.set_aside", f"{text}; {kept}", job=name, seq=seq)
    return AppendFailed(f"{text}; {kept}")


def _keep(folder: Path, name: str, data: bytes) -> Path:
    """Only this user may read it, and no link of somebody else's is followed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else")
    path = folder / name
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    return path
