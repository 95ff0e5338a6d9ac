"""Sleep, wake and in-place updates on real tensors, measured by Paddle's own counter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.engine.paddle.device import default_device
from moebus.engine.paddle.weights import random_weights, save_weights, weights_digest
from moebus.engine.port import (
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineTainted,
    EngineTimeout,
    Level,
    Prompt,
    Unsupported,
)
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.deadlines import Left, Polls
from tests.support.paddle import SMALL, needs_paddle, write_weights

pytestmark = [needs_paddle, pytest.mark.paddle]
PROMPT = Prompt("r", np.arange(30), max_tokens=8)


class Cut:
    """A hook that fails before the write number `at` of a commit; at 0 it never does."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self, point: str, subject: str, deadline: Deadline | None) -> None:
        if point == "write" and self.at:
            self.at -= 1
            if not self.at:
                raise OSError("the power went")


@pytest.fixture
def cut() -> Cut:
    return Cut()


@pytest.fixture
def engine(tmp_path: Path, cut: Cut) -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(SMALL, seed=1, allowed_roots=(str(tmp_path),), hook=cut)
    made.generate(PROMPT, 30)
    made.pause("abort", Left())
    yield made
    made.close()


@pytest.mark.parametrize("level", ["offload", "discard"])
@pytest.mark.parametrize("tags", [ALL_TAGS, ALL_TAGS[::-1], (Tag.WEIGHT,), (Tag.KV_CACHE,)])
def test_twenty_cycles_by_paddles_counter(engine: PaddleEngine, tags: tuple[Tag, ...], level: Level) -> None:
    engine.resume()
    first = engine.generate(PROMPT, 30)
    engine.pause("abort", Left())
    counter = engine.device.memory_allocated
    awake, parameters = counter(), dict(engine._weights.parameters)
    before = {tag: engine.inspect().bytes_by_tag[tag] for tag in tags}
    for _ in range(20):
        for tag in tags:
            held = counter()
            assert engine.sleep(tag, level, Left()) == before[tag] == held - counter()
        for tag in tags:
            held = counter()
            assert engine.wakeup(tag, "restore", Left()) == before[tag] == counter() - held
        assert counter() == awake
    assert all(engine._weights.parameters[name] is parameter for name, parameter in parameters.items())
    assert weights_digest(dict(engine.weights())) == engine.inspect().weights_digest
    engine.resume()
    again = engine.generate(PROMPT, 30)
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert np.array_equal(again.routes, first.routes)  # type: ignore[arg-type]
    assert np.array_equal(again.logprobs, first.logprobs)


def test_an_update_needs_no_device_memory_and_keeps_parameter_objects(engine: PaddleEngine, tmp_path: Path) -> None:
    write_weights(tmp_path / "w.safetensors", 7)
    awake, parameters = engine.device.memory_allocated(), dict(engine._weights.parameters)
    pointers = [parameter.data_ptr() for parameter in parameters.values()]
    staged = engine.stage("v7", str(tmp_path / "w.safetensors"), None, Left())
    assert engine.device.memory_allocated() == awake
    engine.commit(staged, "reset", Left())
    assert engine.device.memory_allocated() == awake
    assert all(engine._weights.parameters[name] is parameter for name, parameter in parameters.items())
    assert [parameter.data_ptr() for parameter in engine._weights.parameters.values()] == pointers
    expected = random_weights(SMALL, 7)
    assert all(np.array_equal(array, expected[name]) for name, array in engine.weights().items())


def test_the_file_may_change_between_stage_and_commit(engine: PaddleEngine, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_weights(path, 7)
    staged = engine.stage("v7", str(path), None, Left())
    path.write_bytes(b"\0" * path.stat().st_size)  # in place: a mapped file would change under us
    engine.commit(staged, "reset", Left())
    assert weights_digest(dict(engine.weights())) == weights_digest(random_weights(SMALL, 7))


@pytest.mark.parametrize("at", [2, 10])
def test_a_commit_cut_off_taints_and_only_an_update_heals(
    engine: PaddleEngine, cut: Cut, tmp_path: Path, at: int
) -> None:
    write_weights(tmp_path / "w.safetensors", 7)
    staged = engine.stage("v7", str(tmp_path / "w.safetensors"), None, Left())
    cut.at = at
    with pytest.raises(EngineTainted, match=rf"after {at - 1} of .*the power went"):
        engine.commit(staged, "reset", Left())
    state = engine.inspect()
    assert (state.tainted, state.weights_valid, state.version, state.weights_digest) == (True, False, None, None)
    with pytest.raises(EngineFailed, match="not valid"):
        engine.resume()
    engine.sleep(Tag.WEIGHT, "offload", Left())
    engine.wakeup(Tag.WEIGHT, "restore", Left())
    assert engine.inspect().tainted  # a memory that was mixed counts again after an update only
    engine.commit(staged, "reset", Left())
    state = engine.inspect()
    assert (state.tainted, state.version) == (False, "v7")
    engine.resume()
    fresh = PaddleEngine.create(SMALL, seed=7)
    try:
        assert engine.generate(PROMPT, 30).token_ids.tolist() == fresh.generate(PROMPT, 30).token_ids.tolist()
    finally:
        fresh.close()


def test_a_commit_stopped_before_the_first_write_leaves_the_old_weights(
    engine: PaddleEngine, cut: Cut, tmp_path: Path
) -> None:
    before = engine.inspect()
    staged = engine.stage("v7", None, None, Left())
    cut.at = 1
    with pytest.raises(EngineFailed, match="not written"):
        engine.commit(staged, "reset", Left())
    assert engine.inspect() == before
    engine.resume()
    assert engine.generate(PROMPT, 30).cached_tokens > 0


def _asleep(engine: PaddleEngine) -> None:
    engine.sleep(Tag.WEIGHT, "offload", Left())


@pytest.mark.parametrize(
    ("prepare", "act"),
    [
        (lambda e: None, lambda e: e.sleep(Tag.WEIGHT, "offload", Polls(5))),
        (_asleep, lambda e: e.wakeup(Tag.WEIGHT, "restore", Polls(5))),
        (_asleep, lambda e: e.wakeup(Tag.WEIGHT, "empty", Polls(5))),
    ],
    ids=["sleep", "restore", "empty"],
)
def test_a_deadline_in_the_middle_leaves_it_as_it_was(
    engine: PaddleEngine, prepare: Callable[[PaddleEngine], None], act: Callable[[PaddleEngine], int]
) -> None:
    prepare(engine)
    before, held = engine.inspect(), engine.device.memory_allocated()
    with pytest.raises(EngineTimeout):
        act(engine)
    assert engine.inspect() == before
    assert engine.device.memory_allocated() == held
    engine.wakeup(Tag.WEIGHT, "restore", Left())
    assert engine.inspect().version == "initial"


def test_weights_woken_empty_can_still_be_restored(engine: PaddleEngine) -> None:
    before = engine.inspect()
    engine.sleep(Tag.WEIGHT, "discard", Left())
    engine.wakeup(Tag.WEIGHT, "empty", Left())
    with pytest.raises(EngineFailed, match="empty"):
        engine.weights()
    assert engine.wakeup(Tag.WEIGHT, "restore", Left()) == 0
    assert engine.inspect() == before


def test_an_engine_may_start_from_a_file_and_come_back_to_it(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_weights(path, 5)
    engine = PaddleEngine.create(SMALL, version="base", source=path.as_uri(), allowed_roots=(str(tmp_path),))
    try:
        digest = weights_digest(random_weights(SMALL, 5))
        assert engine.inspect().weights_digest == digest
        engine.pause("abort", Left())
        save_weights(tmp_path / "x.safetensors", random_weights(SMALL, 6))
        engine.commit(engine.stage("x", str(tmp_path / "x.safetensors"), None, Left()), "reset", Left())
        assert engine.inspect().weights_digest != digest
        engine.commit(engine.stage("again", None, digest, Left()), "reset", Left())
        engine.sleep(Tag.WEIGHT, "discard", Left())
        engine.wakeup(Tag.WEIGHT, "restore", Left())
        assert (engine.inspect().version, engine.inspect().weights_digest) == ("again", digest)
    finally:
        engine.close()


def test_an_engine_does_not_start_from_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(EngineRefused):
        PaddleEngine.create(SMALL, source="/etc/hostname", allowed_roots=(str(tmp_path),))


def test_what_it_cannot_do_is_said(engine: PaddleEngine) -> None:
    assert not engine.capabilities().transfer
    with pytest.raises(Unsupported, match="transfer"):
        engine.transfer("init", None, {}, Left())
    assert "recompute" not in engine.capabilities().cache_modes
    with pytest.raises(Unsupported, match="cache"):
        engine.commit(engine.stage("v", None, None, Left()), "recompute", Left())


def test_closing_gives_all_memory_back() -> None:
    before = default_device().memory_allocated()
    engine = PaddleEngine.create(SMALL, seed=1)
    assert default_device().memory_allocated() > before
    engine.generate(PROMPT, 30)
    engine.close()
    assert default_device().memory_allocated() == before
    assert not engine._scheduler.running
