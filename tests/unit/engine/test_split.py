"""Prefill in one engine, decode in another: the same result as one engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.paddle import HandoverRefused, ModelConfig, PaddleEngine
from moebus.engine.port import EngineFailed
from tests.support.deadlines import Left
from tests.support.exact import check_exact
from tests.support.exact_cases import handed_over
from tests.support.paddle import SMALL, needs_paddle, write_weights
from tests.support.split_pair import PROMPT, Pair, equal, pair_of

pytestmark = [needs_paddle, pytest.mark.paddle]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with pair_of(tmp_path, replace(SMALL, block_size=16, num_blocks=24, max_batch=3)) as made:
        yield made


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
