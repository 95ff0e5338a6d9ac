"""Small rounds of reinforcement learning over one engine: how far trainer and rollout are apart, with replay or not.

The trainer's router differs from the rollout's as a lower precision makes it; its weights are the same. Each step rolls
out, compares, takes one policy-gradient step and gives the new weights to the engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.engine import PaddleEngine
from moebus.engine.paddle.model import Route, Tensor
from moebus.engine.paddle.reference import as_tensors, whole_logits
from moebus.engine.paddle.replay import PerturbedRouter, RouterReplay
from moebus.engine.paddle.routing import OwnRouting
from moebus.engine.paddle.runtime import load_paddle
from moebus.engine.paddle.weights import Arrays, save_weights
from moebus.engine.port import Generation, Prompt
from moebus.engine.waiting import Never
from moebus.schemas.errors import InvalidInput

_STEP = 1.0
"""Length of one update of all weights together, whatever the gradient's."""


@dataclass
class Course:
    """One entry per step. `kl`: of the rollout's policy from the trainer's, mean over output tokens of r - 1 - log r,
    r being p(trainer) / p(rollout) (the estimator known as k3); `delta`: mean |log p(trainer) - log p(rollout)|;
    `reward`: mean over requests; `rows`: rows that were replayed."""

    kl: list[float] = field(default_factory=list)
    delta: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class ReplayTrainer:
    """Policy gradient on a copy of the model. `replay`: routes as recorded, else by its own router; `router_bf16`, its
    router's logits are rounded to bfloat16; `router_noise`: standard deviation of what is added to them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Arrays,
        *,
        replay: bool,
        router_bf16: bool = False,
        router_noise: float = 0.0,
    ) -> None:
        self._config = config
        self._replay = replay
        self._bf16 = router_bf16
        self._noise = router_noise
        self._weights: dict[str, Tensor] = as_tensors(weights)
        for tensor in self._weights.values():
            tensor.stop_gradient = False

    def arrays(self) -> Arrays:
        """The weights now, on the host."""
        return {name: np.array(tensor.numpy()) for name, tensor in self._weights.items()}

    def step(self, rollouts: Sequence[tuple[Prompt, Generation]], rewards: Sequence[float], course: Course) -> None:
        """Compares, adds to `course`, and takes one step towards what was rewarded above the mean.

        Raises:
            InvalidInput: a generation has no routes to replay.  ReplayUnused.
        """
        mean = float(np.mean(rewards))
        logs: list[npt.NDArray[np.float64]] = []
        rows = 0
        for seed, ((prompt, result), reward) in enumerate(zip(rollouts, rewards, strict=True)):
            logprobs, used = self._forward(prompt, result, seed)
            rows += used
            logs.append(logprobs.numpy().astype(np.float64) - result.logprobs)
            (logprobs.sum() * -(reward - mean)).backward()
        every = np.concatenate(logs)
        course.kl.append(float(np.mean(np.expm1(every) - every)))
        course.delta.append(float(np.abs(every).mean()))
        course.reward.append(mean)
        course.rows.append(rows)
        self._descend()

    def _forward(self, prompt: Prompt, result: Generation, seed: int) -> tuple[Tensor, int]:
        """Log probabilities of the output tokens, and how many rows were replayed."""
        paddle = load_paddle()
        tokens = np.concatenate([prompt.token_ids, result.token_ids])
        replay = None
        if self._replay:
            if result.routes is None:
                raise InvalidInput("routes", f"{result.request_id!r} has none to replay")
            replay = RouterReplay(self._config.card(), result.routes, norm_topk=self._config.norm_topk)
        route: Route = replay or OwnRouting(self._config)
        if self._bf16 or self._noise:
            route = PerturbedRouter(route, self._noise, self._bf16, seed)
        logits = whole_logits(self._config, self._weights, tokens[:-1], route)
        first = len(prompt.token_ids) - 1
        whole = paddle.nn.functional.log_softmax(logits[first:], axis=-1)
        picked = paddle.take_along_axis(whole, paddle.to_tensor(result.token_ids[:, None]), axis=-1)
        return picked.squeeze(-1), 0 if replay is None else replay.check_used()

    def _descend(self) -> None:
        paddle = load_paddle()
        gradients = {name: tensor.grad for name, tensor in self._weights.items() if tensor.grad is not None}
        length = float(sum((grad * grad).sum() for grad in gradients.values())) ** 0.5
        with paddle.no_grad():
            for name, grad in gradients.items():
                tensor = self._weights[name]
                paddle.assign(tensor - grad * (_STEP / max(length, 1e-12)), output=tensor)
                tensor.clear_gradient()


def train(
    config: ModelConfig, steps: int, *, requests: int = 16, max_tokens: int = 48, seed: int = 0, **trainer: Any
) -> Course:
    """`steps` rounds on an engine of its own with random weights from `seed`; `trainer`: as ReplayTrainer's.

    The reward of a request is the share of even tokens in its output.
    """
    course, draw = Course(), np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="moebus-training-") as folder:
        engine = PaddleEngine.create(config, seed=seed, allowed_roots=(folder,))
        try:
            learner = ReplayTrainer(config, dict(engine.weights()), **trainer)
            for step in range(steps):
                prompts = [
                    Prompt(
                        f"{step}:{one}",
                        draw.integers(0, config.vocab_size, 20),
                        max_tokens,
                        1.0,
                        seed=step * 1000 + one,
                    )
                    for one in range(requests)
                ]
                results = engine.generate_many(prompts, 600)
                rewards = [float(np.mean(result.token_ids % 2 == 0)) for result in results]
                learner.step(list(zip(prompts, results, strict=True)), rewards, course)
                _update(engine, learner.arrays(), f"step-{step + 1}", Path(folder))
        finally:
            engine.close()
    return course


def _update(engine: PaddleEngine, weights: Arrays, version: str, folder: Path) -> None:
    path = folder / "weights.safetensors"
    save_weights(path, weights)
    engine.pause("wait", Never())
    engine.commit(engine.stage(version, str(path), None, Never()), "reset", Never())
    engine.resume()
