"""Trains a few steps on the Paddle engine, with and without routing replay, and plots how far trainer and rollout are
apart. Usage: `python examples/replay_kl.py OUT.png [steps] [requests]`
"""

from __future__ import annotations

import sys

import matplotlib
import numpy as np

from moebus.engine.paddle import TINY
from moebus.engine.paddle.training import Course, train

TRAINERS: dict[str, dict[str, bool]] = {
    "router in bf16, own top-k": {"replay": False, "router_bf16": True},
    "router in bf16, routes replayed": {"replay": True, "router_bf16": True},
    "same router, routes replayed": {"replay": True},
}


def main(target: str, steps: int = 12, requests: int = 16) -> dict[str, Course]:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    courses = {name: train(TINY, steps, requests=requests, **how) for name, how in TRAINERS.items()}
    for name, course in courses.items():
        axes.semilogy(range(1, steps + 1), np.maximum(course.kl, 1e-16), marker="o", label=name)
        print(
            f"{name:32} KL {np.mean(course.kl):.1e}  |delta log p| {np.mean(course.delta):.1e}  {sum(course.rows)} rows"
        )
    axes.set(xlabel="training step", ylabel="KL(rollout || trainer), k3", title="Rollout and trainer, by step")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.12))
    figure.savefig(target, dpi=110)
    return courses


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
