"""The demo's model: the tiny one, its first weights from a seed and its next ones in a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moebus.engine.paddle import TINY
from moebus.engine.paddle.weights import random_weights, save_weights

CONFIG = TINY
FIRST_VERSION = "step-0"
NEW_VERSION = "step-1"
SEED = 7
_STEP = 0.2

Weights = Mapping[str, np.ndarray]


def make_weights(folder: Path) -> tuple[dict[str, Weights], Path]:
    """Both versions of the weights, as the trainer has them, and the file of the second one.

    The second is the first moved a step in a random direction, as an optimiser's step would.
    """
    first = random_weights(CONFIG, SEED)
    direction = random_weights(CONFIG, SEED + 1)
    second = {name: (value + _STEP * direction[name]).astype(np.float32) for name, value in first.items()}
    path = folder / f"{NEW_VERSION}.safetensors"
    save_weights(path, second)
    return {FIRST_VERSION: first, NEW_VERSION: second}, path
