"""A very small Paddle model for tests, and its weight files. Importing this does not import Paddle."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from moebus.engine.paddle import ModelConfig
from moebus.engine.paddle.weights import random_weights, save_weights

SMALL = ModelConfig(
    vocab_size=128,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    num_experts=8,
    top_k=2,
    intermediate_size=48,
    moe_intermediate_size=16,
    max_position=512,
    block_size=8,
    num_blocks=128,
    max_batch=8,
)


def write_weights(path: Path, seed: int) -> None:
    """A good safetensors file of SMALL's weights drawn from `seed`."""
    save_weights(path, random_weights(SMALL, seed))


needs_paddle = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddlepaddle is not installed")
"""Looks for Paddle without importing it: our own import is the one that leaves no trace."""
