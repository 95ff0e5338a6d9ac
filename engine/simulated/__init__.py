"""A deterministic engine of pure Python: same port, same rules, no model. For tests, drills and large fleets."""

from moebus.engine.simulated.config import SimulatedConfig
from moebus.engine.simulated.engine import SimulatedEngine
from moebus.engine.simulated.oracle import expected_routes
from moebus.engine.simulated.rendezvous import Rendezvous

__all__ = ["Rendezvous", "SimulatedConfig", "SimulatedEngine", "expected_routes"]
