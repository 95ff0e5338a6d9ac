"""The rules of the Engine port, for every engine in this process: subclass EngineSuite as `Test...` with `new_rig`."""

from __future__ import annotations

from tests.contract.engine_generation import GenerationRules
from tests.contract.engine_lifecycle import LifecycleRules
from tests.contract.engine_memory import MemoryRules
from tests.contract.engine_rig import Rig
from tests.contract.engine_traffic import TrafficRules
from tests.contract.engine_weights import WeightRules


class EngineSuite(GenerationRules, LifecycleRules, MemoryRules, WeightRules, TrafficRules):
    """All of them."""


__all__ = ["EngineSuite", "Rig"]
