"""The controller's side of the control plane: commands, their outcomes, their traces."""

from __future__ import annotations

from moebus.producers.control.aio import AsyncControlClient, AsyncOperation
from moebus.producers.control.client import ControlClient
from moebus.producers.control.commands import CallOptions, Commands
from moebus.producers.control.errors import FleetError, FleetPartial, FleetTimeout, UnknownOperation
from moebus.producers.control.fleet import MemberView
from moebus.producers.control.history import HistoryEntry
from moebus.producers.control.operation import Operation
from moebus.producers.control.outcome import Outcome, Status
from moebus.producers.control.trace import Trace, TraceEvent

__all__ = [
    "AsyncControlClient",
    "AsyncOperation",
    "CallOptions",
    "Commands",
    "ControlClient",
    "FleetError",
    "FleetPartial",
    "FleetTimeout",
    "HistoryEntry",
    "MemberView",
    "Operation",
    "Outcome",
    "Status",
    "Trace",
    "TraceEvent",
    "UnknownOperation",
]
