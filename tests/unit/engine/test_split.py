"""Prefill in one engine, decode in another: the same result as one engine, or a refusal by name, and nothing stuck."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.paddle import Handover, HandoverRefused, ModelConfig, PaddleEngine, PrefillAborted
from moebus.engine.port import EngineClosed, EngineFailed, EngineTimeout, Generation, Prompt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.tags import Tag
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.exact import check_exact
from tests.support.exact_cases import handed_over
from tests.support.gate import Gate
from tests.support.generate import random_prompts
from tests.support.paddle import SMALL, needs_paddle, write_weights
from tests.support.wait import wait_until

pytestmark = [needs_paddle, pytest.mark.paddle]
PROMPT = replace(random_prompts(1, (43, 44), SMALL.vocab_size, 3, max_tokens=12, temperature=1.0)[0], seed=9)


@dataclass
class Pair:
    """A prefill engine, a decode engine with a gate, and one engine that does both."""

    first: PaddleEngine
    second: PaddleEngine
    gate: Gate
    one: PaddleEngine

    def hand(self, prompt: Prompt = PROMPT) -> Handover:
        return handed_over(self.first.prefill(prompt, 30))

    def run(self, prompt: Prompt = PROMPT) -> Generation:
        return self.second.decode(self.hand(prompt), prompt, 30)

    def free(self) -> bool:
        return all(e.cache.pool.available == e.cache.pool.total for e in (self.first, self.second))


@contextlib.contextmanager
def pair_of(root: Path, second: ModelConfig) -> Iterator[Pair]:
    gate = Gate()
    roots = (str(root),)
    engines = [PaddleEngine.create(SMALL, seed=1, allowed_roots=roots) for _ in range(2)]
    made = Pair(engines[0], PaddleEngine.create(second, seed=1, hook=gate, allowed_roots=roots), gate, engines[1])
    try:
        yield made
    finally:
        gate.open()
        for engine in (*engines, made.second):
            engine.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with pair_of(tmp_path, replace(SMALL, block_size=16, num_blocks=24, max_batch=3)) as made:
        yield made


def equal(result: Generation, expected: Generation) -> None:
    assert result.token_ids.tolist() == expected.token_ids.tolist()
    assert np.array_equal(result.routes, expected.routes)  # type: ignore[arg-type]
    assert np.abs(result.logprobs - expected.logprobs).max(initial=0) < 2e-5
    for name in ("request_id", "prompt_tokens", "finish_reason", "versions", "cached_tokens"):
        assert getattr(result, name) == getattr(expected, name), name


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 12])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_what_one_engine_gives(pair: Pair, max_tokens: int, temperature: float) -> None:
    prompt = replace(PROMPT, max_tokens=max_tokens, temperature=temperature)
    handover = pair.hand(prompt)
    assert (handover.head.first is None) == (max_tokens == 0)
    result = pair.second.decode(handover, prompt, 30)
    equal(result, pair.one.generate(prompt, 30))
    assert result.routes is not None
    assert len(result.routes) == (43 + max_tokens - 1 if max_tokens else 43)
    assert pair.free()


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("how", ["eos", "stop id"])
def test_a_stop_token_ends_it_also_as_the_first(tmp_path: Path, pair: Pair, at: int, how: str) -> None:
    free_run = pair.one.generate(PROMPT, 30)
    stop = int(free_run.token_ids[at])
    pair.one.reset_cache()
    if how == "stop id":
        prompt = replace(PROMPT, stop_token_ids=(stop,))
        equal(pair.run(prompt), pair.one.generate(prompt, 30))
        return
    config = replace(SMALL, eos_token_ids=(stop,))
    engines = [PaddleEngine.create(config, seed=1) for _ in range(2)]
    try:
        result = engines[1].decode(handed_over(engines[0].prefill(PROMPT, 30)), PROMPT, 30)
        assert (result.finish_reason, result.token_ids.tolist()) == ("stop", free_run.token_ids[: at + 1].tolist())
        ignoring = replace(PROMPT, ignore_eos=True)
        result = engines[1].decode(engines[0].prefill(ignoring, 30), ignoring, 30)
        assert result.token_ids.tolist() == free_run.token_ids.tolist()
        with pytest.raises(HandoverRefused, match="eos_token_ids"):
            pair.second.decode(engines[0].prefill(PROMPT, 30), PROMPT, 30)
    finally:
        for engine in engines:
            engine.close()


def test_both_ends_tell_tokens(pair: Pair) -> None:
    told: list[list[int]] = [[], []]
    asked = [replace(PROMPT, on_token=lambda token, _, at=at: told[at].append(token)) for at in (0, 1)]  # type: ignore[misc]
    result = pair.second.decode(handed_over(pair.first.prefill(asked[0], 30)), asked[1], 30)
    assert told == [result.token_ids[:1].tolist(), result.token_ids.tolist()]


def test_a_callback_that_fails_on_the_first_token_ends_its_request_only(pair: Pair) -> None:
    def broken(token: int, logprob: float) -> None:
        raise OSError("closed")

    with pytest.raises(EngineFailed, match="closed"):
        pair.second.decode(pair.hand(), replace(PROMPT, on_token=broken), 30)
    with pytest.raises(EngineFailed, match="closed"):
        pair.first.prefill(replace(PROMPT, on_token=broken), 30)
    assert pair.free()
    equal(replace(pair.run(), cached_tokens=0), pair.one.generate(PROMPT, 30))


# -- prefix caches on either side


@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
@pytest.mark.parametrize("shared", [16, 32, 42])
def test_prefix_hits(pair: Pair, where: str, shared: int) -> None:
    before = replace(PROMPT, token_ids=PROMPT.token_ids[: shared + 1], max_tokens=1, request_id="before")
    warmed = {"prefill": [pair.first, pair.one], "decode": [pair.second], "both": [pair.first, pair.second, pair.one]}
    for engine in warmed[where]:
        engine.generate(before, 30)
    handover = pair.hand()
    assert handover.head.cached_tokens == (0 if where == "decode" else shared // 8 * 8)
    result = pair.second.decode(handover, PROMPT, 30)
    equal(result, pair.one.generate(PROMPT, 30))
    check_exact(pair.second, [PROMPT], [result])
    assert pair.free()


def test_what_was_handed_over_serves_later_requests(pair: Pair) -> None:
    pair.run(replace(PROMPT, max_tokens=1))
    longer = replace(PROMPT, token_ids=np.append(PROMPT.token_ids, [5, 6, 7]), request_id="longer")
    result = pair.second.generate(longer, 30)
    assert result.cached_tokens == 32
    check_exact(pair.second, [longer], [result])


def test_blocks_of_another_version_in_the_cache_are_not_taken_for_it(pair: Pair, tmp_path: Path) -> None:
    """The decode engine kept its cache over an update: a hit there would be of the weights before."""
    pair.second.generate(PROMPT, 30)
    write_weights(tmp_path / "w.safetensors", 7)
    for engine in (pair.first, pair.second, pair.one):
        engine.pause("abort", Left())
        staged = engine.stage("v7", str(tmp_path / "w.safetensors"), None, Left())
        engine.commit(staged, "keep", Left())
        engine.resume()
    result = pair.run()
    equal(result, pair.one.generate(PROMPT, 30))
    assert result.versions == ((0, "v7"),)
    assert pair.free()


def test_rows_of_several_versions_stay_theirs_and_out_of_the_cache(pair: Pair, tmp_path: Path) -> None:
    """The prefill engine kept its cache over an update: the head of the prompt was computed by the weights before."""
    write_weights(tmp_path / "w.safetensors", 7)
    for engine in (pair.first, pair.second, pair.one):
        if engine is not pair.second:
            engine.generate(replace(PROMPT, max_tokens=1), 30)
        engine.pause("abort", Left())
        staged = engine.stage("v7", str(tmp_path / "w.safetensors"), None, Left())
        engine.commit(staged, "keep", Left())
        engine.resume()
    result = pair.run()
    equal(result, pair.one.generate(PROMPT, 30))
    assert result.versions == ((0, "initial"), (40, "v7"))
    after = pair.second.generate(replace(PROMPT, request_id="after"), 30)
    assert (after.cached_tokens, after.versions) == (0, ((0, "v7"),))


# -- what is refused


def test_other_weights_are_refused(pair: Pair, tmp_path: Path) -> None:
    handover = pair.hand()
    write_weights(tmp_path / "w.safetensors", 7)
    pair.second.pause("abort", Left())
    for version, source, text in (
        ("v7", str(tmp_path / "w.safetensors"), "prefilled by version 'initial', this engine serves 'v7'"),
        ("initial", str(tmp_path / "w.safetensors"), "version 'initial' is not the same there and here"),
    ):
        pair.second.commit(pair.second.stage(version, source, None, Left()), "reset", Left())
        pair.second.resume()
        with pytest.raises(HandoverRefused, match=text):
            pair.second.decode(handover, PROMPT, 30)
        assert pair.second.inspect().in_flight == 0
        pair.second.pause("abort", Left())
    pair.second.commit(pair.second.stage("initial", None, None, Left()), "reset", Left())
    pair.second.resume()
    equal(pair.second.decode(handover, PROMPT, 30), pair.one.generate(PROMPT, 30))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"request_id": "other"}, "request_id 'r0', not 'other'"),
        ({"seed": 4}, "seed 9, not 4"),
        ({"temperature": 0.5}, "temperature 1.0, not 0.5"),
        ({"top_p": 0.5}, "top_p 1.0, not 0.5"),
        ({"max_tokens": 0}, "0 tokens are asked for, it was prefilled for some"),
        ({"token_ids": PROMPT.token_ids[:-1]}, "other tokens"),
        ({"token_ids": (PROMPT.token_ids + 1) % 128}, "other tokens"),
    ],
)
def test_another_prompt_is_refused(pair: Pair, change: dict[str, object], text: str) -> None:
    handover = pair.hand()
    with pytest.raises(HandoverRefused, match=text):
        pair.second.decode(handover, replace(PROMPT, **change), 30)  # type: ignore[arg-type]
    assert pair.second.inspect().in_flight == 0


def test_nothing_sampled_is_refused_where_more_is_asked_for(pair: Pair) -> None:
    handover = pair.hand(replace(PROMPT, max_tokens=0))
    with pytest.raises(HandoverRefused, match="12 tokens are asked for, it was prefilled for none"):
        pair.second.decode(handover, PROMPT, 30)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": 16}, "num_experts 8, not 16"),
        ({"rope_theta": 500.0}, "rope_theta"),
        ({"draft_layers": 1}, "draft_layers 0, not 1"),
    ],
)
def test_another_model_is_refused(pair: Pair, change: dict[str, int], text: str) -> None:
    other = PaddleEngine.create(replace(SMALL, **change), seed=1)  # type: ignore[arg-type]
    try:
        with pytest.raises(HandoverRefused, match=text):
            other.decode(pair.hand(), PROMPT, 30)
    finally:
        other.close()


def test_a_prompt_that_never_fits_is_refused(pair: Pair) -> None:
    handover = pair.hand()
    small = PaddleEngine.create(replace(SMALL, num_blocks=6), seed=1)
    try:
        with pytest.raises(InvalidInput, match="exceed 48 positions"):
            small.decode(handover, PROMPT, 30)
    finally:
        small.close()


def test_damage_in_memory_is_refused(pair: Pair) -> None:
    handover = pair.hand()
    for change in ({"keys": handover.keys[:, :-1]}, {"values": handover.values.astype(np.float64)}, {"routes": None}):
        with pytest.raises(HandoverRefused, match="shapes and types"):
            pair.second.decode(replace(handover, **change), PROMPT, 30)
    assert handover.routes is not None
    with pytest.raises(HandoverRefused, match="an expert"):
        pair.second.decode(replace(handover, routes=handover.routes + 8), PROMPT, 30)


def test_an_id_is_in_flight_once(pair: Pair) -> None:
    handover = pair.hand()
    pair.gate.close_after("step", 2)
    call = Background(lambda: pair.second.decode(handover, PROMPT, 30))
    pair.gate.wait_held()
    with pytest.raises(InvalidInput, match="in flight"):
        pair.second.decode(handover, PROMPT, 30)
    pair.gate.open()
    equal(call.result(), pair.one.generate(PROMPT, 30))


# -- pauses, sleep, too few blocks, aborts


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


# -- devices that fail, and capture that is off


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


@pytest.mark.parametrize("suspended", ["first", "second"])
def test_without_capture_there_are_no_routes_and_tokens_all_the_same(pair: Pair, suspended: str) -> None:
    getattr(pair, suspended).suspend_capture()
    result = pair.run()
    expected = pair.one.generate(PROMPT, 30)
    assert result.routes is None
    assert result.token_ids.tolist() == expected.token_ids.tolist()
    assert result.versions == expected.versions
    assert pair.run(replace(PROMPT, capture_routes=False)).routes is None


def test_an_opt_out_hands_over_the_rows_for_others(pair: Pair) -> None:
    quiet = replace(PROMPT, capture_routes=False)
    handover = pair.hand(quiet)
    assert handover.routes is not None
    assert pair.second.decode(handover, quiet, 30).routes is None
    after = replace(PROMPT, request_id="after")
    result = pair.second.generate(after, 30)
    assert result.cached_tokens == 32
    check_exact(pair.second, [after], [result])


@pytest.mark.parametrize("config", [replace(SMALL, draft_layers=2), replace(SMALL, shared_experts=1, num_experts=300)])
def test_other_models(config: ModelConfig) -> None:
    engines = [PaddleEngine.create(config, seed=2) for _ in range(3)]
    try:
        result = engines[1].decode(handed_over(engines[0].prefill(PROMPT, 30)), PROMPT, 30)
        equal(result, engines[2].generate(PROMPT, 30))
    finally:
        for engine in engines:
            engine.close()


def test_bad_prompts_name_the_field(pair: Pair) -> None:
    handover = pair.hand()
    calls: list[Callable[[], object]] = [
        lambda: pair.first.prefill(replace(PROMPT, top_p=0.0), 30),
        lambda: pair.second.decode(handover, replace(PROMPT, top_p=0.0), 30),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="top_p"):
            call()
