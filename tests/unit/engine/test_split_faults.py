"""The prefill / decode split under pauses, sleep, updates, aborts, too few blocks, failing devices: nothing stuck."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine, PrefillAborted
from moebus.engine.port import EngineClosed, EngineFailed, EngineTimeout, Generation, Prompt
from moebus.schemas.tags import Tag
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.exact import check_exact
from tests.support.exact_cases import handed_over
from tests.support.gate import Gate
from tests.support.generate import random_prompts
from tests.support.paddle import SMALL, needs_paddle, write_weights
from tests.support.split_pair import PROMPT, Pair, equal, pair_of
from tests.support.wait import wait_until

pytestmark = [needs_paddle, pytest.mark.paddle]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with pair_of(tmp_path, replace(SMALL, block_size=16, num_blocks=24, max_batch=3)) as made:
        yield made


def test_a_paused_or_sleeping_engine_takes_nothing_and_takes_it_later(pair: Pair) -> None:
    handover = pair.hand()
    pair.second.pause("abort", Left())
    with pytest.raises(EngineClosed):
        pair.second.decode(handover, PROMPT, 30)
    for tag in (Tag.KV_CACHE, Tag.WEIGHT):
        pair.second.sleep(tag, "offload", Left())
        with pytest.raises(EngineClosed):
            pair.second.decode(handover, PROMPT, 30)
    for tag in (Tag.WEIGHT, Tag.KV_CACHE):
        pair.second.wakeup(tag, "restore", Left())
    pair.second.resume()
    equal(pair.second.decode(handover, PROMPT, 30), pair.one.generate(PROMPT, 30))
    pair.first.pause("abort", Left())
    with pytest.raises(EngineClosed):
        pair.first.prefill(PROMPT, 30)


def waiting(pair: Pair) -> tuple[Background[Generation], Background[Generation]]:
    """A request that has nearly all blocks of the decode engine, and one that was handed over and waits for some."""
    big = Prompt("big", np.arange(330) % 128, max_tokens=30, ignore_eos=True)
    pair.gate.close_after("step", 2)
    first = Background(lambda: pair.second.generate(big, 60))
    pair.gate.wait_held()
    handover = pair.hand()
    second = Background(lambda: pair.second.decode(handover, PROMPT, 60))
    wait_until(lambda: pair.second.inspect().in_flight == 2, what="both inside")
    return first, second


def test_it_waits_where_blocks_are_too_few(pair: Pair) -> None:
    first, second = waiting(pair)
    pair.gate.open()
    equal(second.result(), pair.one.generate(PROMPT, 30))
    assert len(first.result().token_ids) == 30
    assert pair.free()


def test_frozen_while_it_waits(pair: Pair, tmp_path: Path) -> None:
    """Kept over an update: what was handed over counts as what a frozen request has computed."""
    first, second = waiting(pair)
    pause = Background(lambda: pair.second.pause("keep", Left()))
    wait_until(lambda: pair.second.inspect().paused, what="admission closed")
    pair.gate.open()
    assert pause.result().frozen == 2
    write_weights(tmp_path / "w.safetensors", 7)
    staged = pair.second.stage("v7", str(tmp_path / "w.safetensors"), None, Left())
    pair.second.commit(staged, "reset", Left())
    pair.second.resume()
    result = second.result()
    expected = pair.one.generate(PROMPT, 30)
    assert result.versions == ((0, "initial"), (43, "v7"))
    assert result.routes is not None
    assert expected.routes is not None
    assert np.array_equal(result.routes[:43], expected.routes[:43])
    assert result.token_ids[0] == expected.token_ids[0]
    first.result()
    after = pair.second.generate(replace(PROMPT, request_id="after"), 30)
    assert (after.cached_tokens, after.versions) == (0, ((0, "v7"),)), "nothing of it is in the new cache"
    assert pair.free()


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_aborted_while_it_waits_it_keeps_what_was_handed_over(pair: Pair, how: str) -> None:
    first, second = waiting(pair)
    if how == "abort":
        assert pair.second.abort_requests(["r0"]) == ["r0"]
        pair.gate.open()
    else:
        pause = Background(lambda: pair.second.pause("abort", Left()))
        wait_until(lambda: pair.second.inspect().paused, what="admission closed")
        pair.gate.open()
        assert pause.result().aborted == 2
    part, expected = second.result(), pair.one.generate(PROMPT, 30)
    assert part.finish_reason == "abort"
    assert part.token_ids.tolist() == expected.token_ids[:1].tolist()
    assert part.routes is not None
    assert expected.routes is not None
    assert np.array_equal(part.routes, expected.routes[:43])
    assert part.versions == ((0, "initial"),)
    first.result()
    assert pair.free()


def test_preempted_after_it_was_handed_over(tmp_path: Path) -> None:
    with pair_of(tmp_path, replace(SMALL, num_blocks=13, max_batch=4)) as pair:
        prompts = random_prompts(2, (38, 39), SMALL.vocab_size, 4, max_tokens=40)
        handed = [pair.hand(one) for one in prompts]
        calls = [
            Background(lambda h=h, p=p: pair.second.decode(h, p, 60))  # type: ignore[misc]
            for h, p in zip(handed, prompts, strict=True)
        ]
        for call, prompt in zip(calls, prompts, strict=True):
            equal(call.result(60), pair.one.generate(prompt, 30))
        assert pair.second.preemptions > 0
        assert pair.free()


def test_a_prefill_that_is_aborted_has_nothing_to_hand_over(tmp_path: Path) -> None:
    gate = Gate()
    engine = PaddleEngine.create(replace(SMALL, prefill_chunk=16), seed=1, hook=gate)
    try:
        for how in (lambda: engine.abort_requests(None), lambda: engine.pause("abort", Left(0.01))):
            gate.close_after("step", 1)
            call = Background(lambda: engine.prefill(PROMPT, 30))
            gate.wait_held()
            with contextlib.suppress(EngineTimeout):
                how()
            gate.open()
            with pytest.raises(PrefillAborted, match="'r0'"):
                call.result()
        gate.close_after("step", 0)
        call = Background(lambda: engine.prefill(PROMPT, 0.01))
        with pytest.raises(EngineTimeout):
            call.result()
        gate.open()
        wait_until(lambda: engine.inspect().in_flight == 0, what="it is gone")
    finally:
        gate.open()
        engine.close()


def test_a_prefill_that_went_on_under_new_weights(tmp_path: Path) -> None:
    """Frozen between two chunks of its prompt, and both engines updated: each row keeps the version it came from."""
    gate, roots = Gate(), (str(tmp_path),)
    write_weights(tmp_path / "w.safetensors", 7)
    first = PaddleEngine.create(replace(SMALL, prefill_chunk=16), seed=1, hook=gate, allowed_roots=roots)
    second = PaddleEngine.create(SMALL, seed=7, version="v7")
    try:
        gate.close_after("step", 1)
        call = Background(lambda: first.prefill(PROMPT, 60))
        gate.wait_held()
        pause = Background(lambda: first.pause("keep", Left()))
        wait_until(lambda: first.inspect().paused, what="admission closed")
        gate.open()
        assert pause.result().frozen == 1
        first.commit(first.stage("v7", str(tmp_path / "w.safetensors"), None, Left()), "reset", Left())
        first.resume()
        handover = handed_over(call.result())
        (_, old), (start, new) = handover.head.versions
        assert (old, new, handover.head.weights_version) == ("initial", "v7", "v7")
        assert start in (16, 32)
        result = second.decode(handover, PROMPT, 60)
        assert result.version_ranges == ((0, start, "initial"), (start, 54, "v7"))
        assert np.array_equal(result.routes[:43], handover.routes)  # type: ignore[index, arg-type]
        after = second.generate(replace(PROMPT, request_id="after"), 60)
        assert after.cached_tokens == 0
        check_exact(second, [PROMPT], [after])
    finally:
        gate.open()
        first.close()
        second.close()


def test_many_at_once_with_aborts_at_random_leak_nothing(pair: Pair) -> None:
    draw = np.random.default_rng(0)
    prompts = random_prompts(16, (5, 60), SMALL.vocab_size, 2, max_tokens=20, temperature=1.0)
    heads = [replace(one, token_ids=np.concatenate([PROMPT.token_ids[:24], one.token_ids])) for one in prompts]
    handed = [pair.hand(one) for one in heads]
    calls = [
        Background(lambda h=h, p=p: pair.second.decode(h, p, 60))  # type: ignore[misc]
        for h, p in zip(handed, heads, strict=True)
    ]
    for index in draw.permutation(16)[:6]:
        pair.second.abort_requests([f"r{index}"])
    results = [call.result(60) for call in calls]
    whole = [one for one in zip(heads, results, strict=True) if one[1].finish_reason == "length"]
    assert len(whole) >= 10
    check_exact(pair.second, [prompt for prompt, _ in whole], [result for _, result in whole])
    for prompt, result in zip(heads, results, strict=True):
        assert result.routes is not None
        assert len(result.routes) == len(prompt.token_ids) + len(result.token_ids) - 1
    assert pair.free()


def _no_copy(*_: object) -> object:
    raise RuntimeError("C++ trace\n\nno memory left")


def test_a_copy_that_fails_in_the_prefill_engine_ends_that_request(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(pair.first._cache, "copy_out", _no_copy)
        with pytest.raises(EngineFailed, match="no memory left"):
            pair.first.prefill(PROMPT, 30)
    assert pair.free()
    equal(replace(pair.run(), cached_tokens=0), pair.one.generate(PROMPT, 30))


def test_a_copy_that_fails_in_the_decode_engine_is_computed_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    handover, expected = pair.hand(), pair.one.generate(PROMPT, 30)
    with monkeypatch.context() as broken:
        broken.setattr(pair.second._cache, "copy_in", _no_copy)
        equal(pair.second.decode(handover, PROMPT, 30), expected)
    assert pair.free()
