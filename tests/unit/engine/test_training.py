"""The example that trains with and without replay: small, and what its page says of it holds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.engine.paddle.training import Course, ReplayTrainer
from moebus.engine.port import Prompt
from moebus.schemas.errors import InvalidInput
from tests.support.paddle import SMALL, needs_paddle

pytestmark = [needs_paddle, pytest.mark.paddle]
ROOT = Path(__file__).parents[3]


def example() -> Any:
    spec = importlib.util.spec_from_file_location("replay_kl", ROOT / "examples" / "replay_kl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_plots_and_replay_is_nearer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "kl.png"
    courses = example().main(str(target), 2, 4)
    assert target.read_bytes().startswith(b"\x89PNG\r\n")
    own, replayed, same = courses.values()
    assert np.mean(same.delta) < 1e-5
    assert 0 < np.mean(replayed.delta) < np.mean(own.delta) / 4
    assert 0 < np.mean(replayed.kl) < np.mean(own.kl) / 4
    assert (len(own.kl), own.rows, replayed.rows) == (2, [0, 0], [4 * 67] * 2)
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert "matplotlib" in sys.modules


def test_the_page_shows_the_picture_and_its_command() -> None:
    page = (ROOT / "docs" / "paddle.md").read_text()
    assert "](replay_kl.png)" in page
    assert "python examples/replay_kl.py docs/replay_kl.png" in page
    assert (ROOT / "docs" / "replay_kl.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_step_moves_towards_the_reward() -> None:
    engine = PaddleEngine.create(SMALL, seed=1)
    prompts = [Prompt(f"r{one}", np.arange(8), 6, 1.0, seed=one) for one in range(4)]
    results = engine.generate_many(prompts, 60)
    weights = dict(engine.weights())
    engine.close()
    trainer, course = ReplayTrainer(SMALL, weights, replay=True), Course()
    rollouts = list(zip(prompts, results, strict=True))
    rewards = [1.0, 0.0, 0.0, 0.0]
    before = [float(trainer._forward(*one, 0)[0].sum()) for one in rollouts]
    trainer.step(rollouts, rewards, course)
    after = [float(trainer._forward(*one, 0)[0].sum()) for one in rollouts]
    assert after[0] - before[0] > max(np.subtract(after[1:], before[1:]))
    assert (course.reward, course.rows) == ([0.25], [4 * 13])
    changed = trainer.arrays()
    assert any(not np.array_equal(changed[name], weights[name]) for name in weights if "router" in name)


def test_what_has_no_routes_is_not_replayed() -> None:
    engine = PaddleEngine.create(SMALL, seed=1)
    prompt = Prompt("r", np.arange(8), 6, capture_routes=False)
    result = engine.generate(prompt, 60)
    trainer = ReplayTrainer(SMALL, dict(engine.weights()), replay=True)
    engine.close()
    with pytest.raises(InvalidInput, match="'r' has none to replay"):
        trainer.step([(prompt, result)], [1.0], Course())
