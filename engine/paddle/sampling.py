"""One token from logits, on the host: the same seed, position and logits give the same token in any batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moebus.engine.port import Prompt


def sample(logits: npt.NDArray[np.float32], prompt: Prompt, index: int) -> tuple[int, float]:
    """The token for output position `index` and its log probability (natural log).

    `logits`: float32 [vocab]. The log probability is the model's own, before temperature and top-p: it is what a
    trainer's forward gives. Greedy takes the lowest id of a tie.
    """
    shifted = logits.astype(np.float64) - float(logits.max())
    total = np.log(np.exp(shifted).sum())
    if prompt.temperature == 0:
        token = int(np.argmax(logits))
    else:
        draw = np.random.default_rng([prompt.seed, index]).random()
        token = _draw(shifted / prompt.temperature, prompt.top_p, draw)
    return token, float(shifted[token] - total)


def _draw(scaled: npt.NDArray[np.float64], top_p: float, draw: float) -> int:
    weights = np.exp(scaled)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order])
    # the fewest tokens, likeliest first, that hold `top_p` of the mass
    kept = int(np.searchsorted(mass, top_p * mass[-1])) + 1 if top_p < 1 else len(mass)
    kept = min(kept, len(mass))
    return int(order[min(int(np.searchsorted(mass[:kept], draw * mass[kept - 1], side="right")), kept - 1)])
