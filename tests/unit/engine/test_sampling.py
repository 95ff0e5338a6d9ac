"""Sampling on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from moebus.engine.paddle.sampling import sample
from moebus.engine.port import Prompt

LOGITS = np.log(np.asarray([0.1, 0.4, 0.15, 0.3, 0.05], dtype=np.float32))


def prompt(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Prompt:
    return Prompt("r", np.asarray([1]), temperature=temperature, top_p=top_p, seed=seed)


def draws(count: int, **kwargs: float) -> npt.NDArray[np.int64]:
    return np.asarray([sample(LOGITS, prompt(**kwargs), index)[0] for index in range(count)])  # type: ignore[arg-type]


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert sample(np.asarray([0, 2, 2, 1], dtype=np.float32), prompt(temperature=0), 0)[0] == 1


def test_the_log_probability_is_the_models_own() -> None:
    for asked in (prompt(temperature=0), prompt(temperature=0.5), prompt(top_p=0.3)):
        token, logprob = sample(LOGITS, asked, 3)
        assert logprob == pytest.approx(float(LOGITS[token]), abs=1e-6)


def test_large_logits_do_not_overflow() -> None:
    token, logprob = sample(np.asarray([1e4, -1e4], dtype=np.float32), prompt(), 0)
    assert (token, logprob) == (0, 0.0)


def test_frequencies_follow_the_distribution() -> None:
    share = np.bincount(draws(4000), minlength=5) / 4000
    assert np.abs(share - np.exp(LOGITS)).max() < 0.03


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, {1}), (0.5, {1, 3}), (0.8, {1, 3, 2}), (1.0, {0, 1, 2, 3, 4})])
def test_top_p_keeps_the_fewest_likeliest(top_p: float, kept: set[int]) -> None:
    assert set(draws(1500, top_p=top_p).tolist()) == kept


def test_low_temperature_is_nearly_greedy() -> None:
    assert set(draws(300, temperature=0.02).tolist()) == {1}


def test_seed_and_position_decide() -> None:
    assert draws(50).tolist() == draws(50).tolist()
    assert draws(50, seed=1).tolist() != draws(50, seed=2).tolist()
    assert len(set(draws(50).tolist())) > 1
