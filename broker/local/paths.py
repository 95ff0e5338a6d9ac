"""Where a local Kafka lives on disk."""

from __future__ import annotations

import os
from pathlib import Path

KAFKA_VERSION = "4.4.0"
"""The version that pom.xml pins."""


def cache_directory() -> Path:
    """Jars and class archives, per user: `$XDG_CACHE_HOME/moebus/kafka-VERSION`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "moebus" / f"kafka-{KAFKA_VERSION}"


def default_directory() -> Path:
    """State, data and logs of `moebus broker up`: under `$MOEBUS_HOME`, else `$XDG_STATE_HOME/moebus`."""
    home = os.environ.get("MOEBUS_HOME")
    if home:
        return Path(home).expanduser().absolute() / "kafka"
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "moebus" / "kafka"
