"""The simulated engine keeps the rules of the port."""

from __future__ import annotations

from pathlib import Path

from moebus.engine.simulated import SimulatedEngine
from tests.contract.engine_suite import EngineSuite, Rig
from tests.contract.engine_weights import WeightRules
from tests.support.gate import Gate
from tests.support.remote import ROOT


class TestSimulatedEngine(EngineSuite):
    def new_rig(self, root: Path) -> Rig:
        gate = Gate()
        engine = SimulatedEngine(allowed_roots=(str(root), ROOT), hook=gate)
        return Rig(engine, gate, root, _write, len(engine.config.moe_layers), engine.config.top_k)


class TestValidatingEngine(WeightRules):
    """One that keeps nothing of what it checked and reads it again."""

    def new_rig(self, root: Path) -> Rig:
        gate = Gate()
        engine = SimulatedEngine(stage="validated", allowed_roots=(str(root), ROOT), hook=gate)
        return Rig(engine, gate, root, _write, len(engine.config.moe_layers), engine.config.top_k)


def _write(path: Path, seed: int) -> None:
    path.write_bytes(f"weights {seed}".encode())
