"""What the adapters of HTTP servers share: calls with errors that mean one thing, identity, and beliefs."""

from __future__ import annotations

from moebus.engine.http.address import check_url, read_token
from moebus.engine.http.answers import Reply
from moebus.engine.http.belief import Belief
from moebus.engine.http.command import one_command
from moebus.engine.http.engine import ServerEngine
from moebus.engine.http.identity import Lives
from moebus.engine.http.resolve import once_more, resolved, take_back, undo_late
from moebus.engine.http.server import EngineServer

__all__ = [
    "Belief",
    "EngineServer",
    "Lives",
    "Reply",
    "ServerEngine",
    "check_url",
    "once_more",
    "one_command",
    "read_token",
    "resolved",
    "take_back",
    "undo_late",
]
