"""The page of the Paddle engine: its snippets run, in order, and do what they say; one has a model that is not ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.engine.paddle import ReplayUnused, RouteMissing, RouterReplay
from moebus.schemas.errors import InvalidInput
from tests.support.paddle import needs_paddle

pytestmark = [needs_paddle, pytest.mark.paddle]
PAGE = (Path(__file__).parents[3] / "docs" / "paddle.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the snippets define."""
    found: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("page")
    for number, snippet in enumerate(SNIPPETS):
        code = snippet.replace("/tmp/handover", str(folder / "handover"))
        exec(compile(code, f"docs/paddle.md, snippet {number + 1}", "exec"), found)
    return found


def test_there_are_four_snippets_and_no_open_places() -> None:
    assert len(SNIPPETS) == 4
    assert "@" not in PAGE


def test_what_was_gathered_is_what_the_model_routes_by(names: dict[str, Any]) -> None:
    assert names["routes"].shape == (15, 2, 2)
    assert names["routes"].dtype == np.uint8
    assert names["versions"] == ((0, "v1"),)
    seen: dict[int, Any] = {}
    with names["paddle"].no_grad():
        names["model"](names["tokens"], hook=seen.__setitem__)
    whole = np.stack([seen[1].numpy(), seen[2].numpy()], axis=1)
    assert np.array_equal(names["routes"], whole)


def test_replay_gives_the_same_logits_and_other_routes_do_not(names: dict[str, Any]) -> None:
    model, tokens, card, routes = (names[name] for name in ("model", "tokens", "card", "routes"))
    own = model(tokens).numpy()
    assert np.abs(model(tokens, replay=RouterReplay(card, routes)).numpy() - own).max() < 1e-5
    shifted = RouterReplay(card, np.roll(routes, 1, axis=0))
    assert np.abs(model(tokens, replay=shifted).numpy() - own).max() > 1e-3


def test_gradients_reached_the_routers(names: dict[str, Any]) -> None:
    for layer in names["model"].moe:
        assert float(layer.router.weight.grad.abs().sum()) > 0


def test_parts_have_their_rows_and_layers(names: dict[str, Any]) -> None:
    assert names["stage"].forwards == {2: 0}
    assert names["rank"].rows_used == 8
    with pytest.raises(ReplayUnused):
        names["rank"].check_used()
    with pytest.raises(InvalidInput, match="8 rows for a forward of 15"):
        names["model"](names["tokens"], replay=names["rank"])


def test_a_block_that_was_given_away_is_reported(names: dict[str, Any]) -> None:
    capture, generations = names["capture"], names["generations"]
    with pytest.raises(RouteMissing, match=r"8 of 15 rows .* row 0"):
        capture.gather(names["table"], [generations[0] + 1, generations[1]], 15)
    with pytest.raises(RouteMissing, match="1 of 16 rows were not captured, the first is row 15"):
        capture.gather(names["table"], generations, 16)


def test_a_layer_that_forgot_its_hook_is_reported(names: dict[str, Any]) -> None:
    step = names["capture"].step(np.asarray([0]), np.asarray([1]), "v1")
    step(1, names["paddle"].zeros([1, 2], dtype="int64"))
    with pytest.raises(RouteMissing, match=r"layers \[1\] were seen, the model card has \[1, 2\]"):
        step.finish()


def test_what_the_first_snippets_say(names: dict[str, Any]) -> None:
    assert names["result"].routes.shape == (27, 2, 4)
    assert names["result"].token_ids.shape == (8,)
    assert names["handover"].head.first is not None
