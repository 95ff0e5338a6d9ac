"""Many requests at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moebus.engine.port import GeneratingEngine, Generation, Prompt
from tests.support.background import Background


def generate_all(engine: GeneratingEngine, prompts: Sequence[Prompt], timeout: float = 60.0) -> list[Generation]:
    """All of `prompts` in flight together; results in their order."""
    calls = [Background(lambda prompt=prompt: engine.generate(prompt, timeout)) for prompt in prompts]  # type: ignore[misc]
    return [call.result(timeout) for call in calls]


def whole(prompt: Prompt, result: Generation) -> npt.NDArray[np.int64]:
    """Prompt and output together, int64 [P + O]."""
    return np.concatenate([prompt.token_ids, result.token_ids])


def random_prompts(count: int, sizes: tuple[int, int], vocab: int, seed: int, **kwargs: float) -> list[Prompt]:
    """Prompts `r0`, `r1`, ... of random tokens, each with a sampling seed of its own."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(sizes[0], sizes[1], count)
    return [
        Prompt(f"r{index}", draw.integers(0, vocab, length), seed=index, **kwargs)  # type: ignore[arg-type]
        for index, length in enumerate(lengths)
    ]
