"""A class archive (JVM feature, "CDS"): saves about half of Kafka's start. Tied to one Java and to these very jars."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from moebus.broker.local.java import Java

# Without it the JVM remarks on every class it cannot archive; it says nothing else under this tag.
QUIET = "-Xlog:cds=off,cds+dynamic=off:stdout"


def archive_path(cache: Path, java: Java, jars: Sequence[Path]) -> Path:
    """Where the archive of this Java and these jars lies, or would lie."""
    newest = max(jar.stat().st_mtime_ns for jar in jars)
    key = hashlib.sha256(f"{java.executable.resolve()}\n{java.version}\n{newest}".encode()).hexdigest()[:12]
    return cache / "archives" / f"java-{java.major}-{key}.jsa"


def recording_path(archive: Path) -> Path:
    """A file of this process's own to record into; it becomes `archive` after a clean stop."""
    return archive.with_name(f"{archive.stem}.{os.getpid()}.{os.urandom(3).hex()}.tmp")


def use_options(archive: Path) -> list[str]:
    """JVM options that load the archive if it fits, and start without it if not."""
    return [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", QUIET] if archive.exists() else []


def record_options(recording: Path) -> list[str]:
    """JVM options that write the archive when the JVM ends by itself."""
    recording.parent.mkdir(parents=True, exist_ok=True)
    return [f"-XX:ArchiveClassesAtExit={recording}", QUIET]


def finish(recording: Path, archive: Path, clean: bool) -> None:
    """Puts a whole recording in its place; throws away one that a kill may have cut."""
    if clean and recording.exists() and not archive.exists():
        recording.chmod(0o444)
        recording.replace(archive)
    else:
        recording.unlink(missing_ok=True)
