"""Keeping one engine in the state that commands ask for: reconciling, and noticing that its memory was lost."""

from __future__ import annotations

import threading

from moebus.consumers.control.broker_time import BrokerClock, Until
from moebus.consumers.control.effects import Effects, behind
from moebus.consumers.control.log_index import LogIndex
from moebus.consumers.control.reconcile import Reconciler
from moebus.consumers.control.reporter import Reporter
from moebus.engine.port import Capabilities, EngineUnreachable
from moebus.observability.log import get_logger
from moebus.schemas.responses import Lifecycle

RECONCILE_S = 600.0


class Keeper:
    """`dirty`: the engine may not be in the desired state. `same_engine`: its memory was not lost since that state was
    recorded. All but `check` runs on the worker's thread."""

    def __init__(self, reporter: Reporter, can: Capabilities, index: LogIndex, clock: BrokerClock) -> None:
        self._reporter = reporter
        self._engine = reporter.spec.engine
        self._clock = clock
        self.log = get_logger(__name__).bind(worker_id=reporter.spec.worker_id, boot_id=reporter.boot_id)
        self.effects = Effects(self._engine, self.log)
        self._reconciler = Reconciler(self.effects, can, index.updates.get, self.deadline)
        self.lost = threading.Event()
        self.same_engine = True
        self.dirty = True
        self._known = ""

    def deadline(self) -> Until:
        """For work that no command gave a deadline."""
        return Until(self._clock, self._clock.now_ms() + int(RECONCILE_S * 1000))

    def reconcile(self, *, open_traffic: bool) -> None:
        """Drives the engine to the state that commands ask for; where it cannot, the worker is BEHIND or TAINTED."""
        reporter = self._reporter
        try:
            reporter.state = self._reconciler.reconcile(
                reporter.state, same_engine=self.same_engine, digest=reporter.known_digest(), open_traffic=open_traffic
            )
        except Exception as error:
            self.log.error("control.reconcile_failed", str(error), exc=error)
            reporter.state = behind(reporter.state, f"the engine cannot be reconciled: {error}", None)
            if isinstance(error, EngineUnreachable):
                reporter.engine_id = ""  # every heartbeat tries again
        self.dirty, self.same_engine = False, True
        state = reporter.state
        self.log.info("control.reconciled", state.reason or "", lifecycle=str(state.lifecycle), version=state.version)

    def check(self) -> bool:
        """Whether the engine is still the one this worker knows; from any thread."""
        try:
            same = self._engine.identity()[:128] == self._reporter.engine_id
        except Exception as error:
            self.log.warning("control.identity_failed", str(error))
            same = False
        if not same:
            self._reporter.ready = False
            self._reporter.waiting = "the engine restarted; its state is being restored"
            self.lost.set()
        return same

    def close_lost(self) -> None:
        """After a loss: closes admission before anything else, and learns the new identity."""
        self.lost.clear()
        self.log.warning("control.engine_lost", "the engine lost its memory")
        self._reporter.shown = Lifecycle.STARTING
        self._known = self._reporter.engine_id or self._known
        self._reporter.engine_id = ""  # until it says who it is, every heartbeat tries again
        try:
            self._engine.pause("abort", self.deadline())
            self._reporter.engine_id = self._engine.identity()[:128]
        except Exception as error:
            self.log.error("control.pause_failed", str(error), exc=error)
        self.effects.forget()
        self.same_engine, self.dirty = self._reporter.engine_id == self._known, True
