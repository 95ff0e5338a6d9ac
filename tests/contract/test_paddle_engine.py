"""The Paddle engine keeps the rules of the port, on real tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from moebus.engine.paddle import PaddleEngine
from tests.contract.engine_suite import EngineSuite, Rig
from tests.support.gate import Gate
from tests.support.paddle import SMALL, needs_paddle, write_weights
from tests.support.remote import ROOT


@needs_paddle
@pytest.mark.paddle
class TestPaddleEngine(EngineSuite):
    def new_rig(self, root: Path) -> Rig:
        gate = Gate()
        engine = PaddleEngine.create(SMALL, seed=1, allowed_roots=(str(root), ROOT), hook=gate)
        return Rig(engine, gate, root, write_weights, len(SMALL.moe_layers), SMALL.top_k)
