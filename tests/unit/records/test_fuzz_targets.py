"""The targets of `make fuzz` hold on their own seeds, and on a few thousand damaged ones."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.targets import TARGETS, seeds


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_damage(name: str) -> None:
    rng = random.Random(name)
    for seed in seeds(name):
        TARGETS[name](seed)
        for _ in range(40):
            changed = bytearray(seed)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            TARGETS[name](bytes(changed[: rng.randrange(1, len(changed) + 1)]))
            TARGETS[name](bytes(changed))
