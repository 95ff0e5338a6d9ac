"""A small MoE rollout engine on Paddle, in this process, and the trainer's side of routing replay.

Paddle itself is imported when an engine is created or a replay is run, not here.
"""

from moebus.engine.paddle.capture import RouteCapture, RouteMissing
from moebus.engine.paddle.config import TINY, ModelConfig
from moebus.engine.paddle.engine import PaddleEngine
from moebus.engine.paddle.handover import Handover
from moebus.engine.paddle.handover_head import HandoverRefused
from moebus.engine.paddle.hf import model_config
from moebus.engine.paddle.reference import full_recompute
from moebus.engine.paddle.replay import ReplayUnused, RouterReplay, replay_logprobs
from moebus.engine.paddle.runtime import PaddleUnavailable, load_paddle
from moebus.engine.paddle.split import PrefillAborted

__all__ = [
    "TINY",
    "Handover",
    "HandoverRefused",
    "ModelConfig",
    "PaddleEngine",
    "PaddleUnavailable",
    "PrefillAborted",
    "ReplayUnused",
    "RouteCapture",
    "RouteMissing",
    "RouterReplay",
    "full_recompute",
    "load_paddle",
    "model_config",
    "replay_logprobs",
]
