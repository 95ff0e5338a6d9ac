"""What only the simulated engine has: an oracle, drills, transfer, and no thread."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from moebus.engine.port import EngineFailed, EngineTainted, EngineTimeout, Prompt
from moebus.engine.simulated import SimulatedConfig, SimulatedEngine, expected_routes
from moebus.schemas.errors import InvalidInput
from moebus.schemas.tags import Tag
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.gate import Gate
from tests.support.wait import wait_until


def prompt(name: str = "r", size: int = 40, **kwargs: int) -> Prompt:
    return Prompt(name, np.arange(size) % 97, max_tokens=kwargs.pop("max_tokens", 10), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("experts", "top_k", "dtype"), [(1, 1, "uint8"), (16, 4, "uint8"), (384, 8, "uint16"), (70_000, 3, "uint32")]
)
def test_routes_are_those_of_the_oracle(experts: int, top_k: int, dtype: str) -> None:
    config = SimulatedConfig(seed=3, num_experts=experts, top_k=top_k, moe_layers=(3, 5, 9))
    engine = SimulatedEngine(config, version="v0")
    for _ in range(2):  # cold, then with prefix hits
        result = engine.generate(prompt(), 5)
        whole = expected_routes(config, "v0", np.concatenate([prompt().token_ids, result.token_ids]))
        assert result.routes is not None
        assert result.routes.dtype == dtype
        assert np.array_equal(result.routes, whole[:-1])
        assert result.routes.max() < experts
        ordered = np.sort(result.routes, axis=-1)
        assert (ordered[..., 1:] != ordered[..., :-1]).all()


def test_seed_version_layer_and_prefix_change_the_routes() -> None:
    config = SimulatedConfig(num_experts=64)
    tokens = np.arange(50)
    base = expected_routes(config, "a", tokens)
    assert not np.array_equal(base, expected_routes(config, "b", tokens))
    assert not np.array_equal(base, expected_routes(SimulatedConfig(seed=1, num_experts=64), "a", tokens))
    assert not np.array_equal(base[:, 0], base[:, 1])
    other = expected_routes(config, "a", np.concatenate([[7], tokens[1:]]))
    assert not np.array_equal(base[1:], other[1:])
    assert np.array_equal(base[:20], expected_routes(config, "a", tokens[:20]))
    assert len(np.unique(base)) == 64


def test_rows_after_an_update_in_the_middle_are_those_of_the_new_version() -> None:
    gate = Gate()
    engine = SimulatedEngine(hook=gate)
    gate.close_after("step", 3)
    call = Background(lambda: engine.generate(prompt(), 30))
    gate.wait_held()
    pausing = Background(lambda: engine.pause("keep", Left()))
    wait_until(lambda: engine.inspect().paused, what="admission closed")
    gate.open()
    pausing.result()
    engine.commit(engine.stage("v2", None, None, Left()), "reset", Left())
    engine.resume()
    result = call.result()
    (_, first), (start, second) = result.versions
    assert (first, second) == ("initial", "v2")
    tokens = np.concatenate([prompt().token_ids, result.token_ids])
    assert result.routes is not None
    assert np.array_equal(result.routes[:start], expected_routes(engine.config, "initial", tokens)[:start])
    assert np.array_equal(result.routes[start:], expected_routes(engine.config, "v2", tokens)[start:-1])


def test_planned_failures_come_once_each_and_change_nothing() -> None:
    engine = SimulatedEngine()
    before = engine.inspect()
    engine.fail_next("pause", EngineTimeout("slow"))
    engine.fail_next("generate", EngineFailed("x"), times=2)
    with pytest.raises(EngineTimeout):
        engine.pause("abort", Left())
    for _ in range(2):
        with pytest.raises(EngineFailed):
            engine.generate(prompt(), 5)
    assert engine.inspect() == before
    assert engine.generate(prompt(), 5).finish_reason == "length"
    assert engine.pause("abort", Left()).idle_confirmed


def test_a_commit_cut_off_taints_until_the_next_update() -> None:
    engine = SimulatedEngine()
    engine.pause("abort", Left())
    engine.fail_next("commit", EngineTainted("cut off"))
    with pytest.raises(EngineTainted):
        engine.commit(engine.stage("v2", None, None, Left()), "reset", Left())
    state = engine.inspect()
    assert (state.tainted, state.weights_valid, state.version) == (True, False, None)
    with pytest.raises(EngineFailed):
        engine.resume()
    engine.commit(engine.stage("v3", None, None, Left()), "reset", Left())
    engine.resume()
    state = engine.inspect()
    assert (state.tainted, state.version) == (False, "v3")


def test_a_lost_engine_is_another_one_with_its_first_weights() -> None:
    gate = Gate()
    engine = SimulatedEngine(hook=gate)
    engine.pause("abort", Left())
    engine.commit(engine.stage("v2", None, None, Left()), "reset", Left())
    engine.resume()
    gate.close_after("step", 2)
    call = Background(lambda: engine.generate(prompt(), 30))
    gate.wait_held()
    before = engine.identity()
    engine.lose()
    gate.open()
    with pytest.raises(EngineFailed, match="lost"):
        call.result()
    assert engine.identity() != before
    state = engine.inspect()
    assert (state.version, state.paused, state.in_flight) == ("initial", False, 0)


def test_inspect_answers_while_a_sleep_takes_long() -> None:
    gate = Gate()
    engine = SimulatedEngine(hook=gate)
    engine.pause("abort", Left())
    gate.close_after("sleep", 0)
    call = Background(lambda: engine.sleep(Tag.WEIGHT, "discard", Left()))
    gate.wait_held()
    begun = time.monotonic()
    assert engine.inspect().resident[Tag.WEIGHT]
    assert time.monotonic() - begun < 1
    gate.open()
    assert call.result() == engine.config.weight_bytes


def test_transfer_steps() -> None:
    engine = SimulatedEngine()
    engine.pause("abort", Left())
    with pytest.raises(EngineFailed, match="start"):
        engine.transfer("finish", "v2", {}, Left())
    for step in ("init", "start", "update"):
        engine.transfer(step, "v2", {"opaque": 1}, Left())
    assert not engine.inspect().weights_valid
    engine.transfer("finish", "v2", {}, Left())
    engine.resume()
    assert engine.inspect().version == "v2"
    assert engine.generate(prompt(), 5).versions == ((0, "v2"),)
    engine.pause("abort", Left())
    engine.sleep(Tag.WEIGHT, "discard", Left())
    with pytest.raises(EngineFailed):  # nothing to restore transferred weights from
        engine.wakeup(Tag.WEIGHT, "restore", Left())


def test_hundreds_need_no_thread() -> None:
    threads = threading.active_count()
    engines = [SimulatedEngine(SimulatedConfig(seed=seed)) for seed in range(300)]
    assert all(engine.generate(prompt(size=5, max_tokens=2), 5).routes is not None for engine in engines)
    assert len({engine.identity() for engine in engines}) == 300
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("field", "kwargs"),
    [("top_k", {"top_k": 17}), ("moe_layers", {"moe_layers": ()}), ("vocab_size", {"vocab_size": 0})],
)
def test_bad_configs_name_the_field(field: str, kwargs: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as caught:
        SimulatedConfig(**kwargs)  # type: ignore[arg-type]
    assert caught.value.field == field
