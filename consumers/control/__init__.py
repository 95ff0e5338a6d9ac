"""The control worker: reads the command log, drives an engine, answers every command once."""

from moebus.consumers.control.feed import LogReplaced
from moebus.consumers.control.host import ControlWorkerHost, Superseded
from moebus.consumers.control.reporter import WorkerSpec

__all__ = ["ControlWorkerHost", "LogReplaced", "Superseded", "WorkerSpec"]
