"""Rules of the Engine port: generation and abort."""

from __future__ import annotations

import time

import numpy as np
import pytest

from moebus.engine.port import (
    EngineFailed,
    EngineTimeout,
    Prompt,
)
from moebus.schemas.errors import InvalidInput
from tests.contract.engine_rig import EngineRules, Rig, same
from tests.support.background import Background
from tests.support.wait import wait_until


class GenerationRules(EngineRules):
    def test_rows_and_shapes(self, rig: Rig) -> None:
        result = rig.run(rig.prompt(size=10, max_tokens=5))
        assert result.finish_reason == "length"
        assert result.token_ids.dtype == np.int64
        assert result.token_ids.shape == (5,)
        assert result.logprobs.dtype == np.float32
        assert result.logprobs.shape == (5,)
        assert (result.logprobs <= 0).all()
        assert result.routes is not None
        assert result.routes.shape == (14, rig.moe_layers, rig.top_k)
        assert result.routes.dtype == np.uint8
        assert result.versions == ((0, "initial"),)

    def test_one_token_has_the_rows_of_the_prompt(self, rig: Rig) -> None:
        result = rig.run(rig.prompt(size=7, max_tokens=1))
        assert result.routes is not None
        assert len(result.routes) == 7

    def test_no_token_asked_for_has_the_rows_of_the_prompt_too(self, rig: Rig) -> None:
        for _ in range(2):
            result = rig.run(rig.prompt(size=17, max_tokens=0))
            assert result.finish_reason == "length"
            assert len(result.token_ids) == len(result.logprobs) == 0
            assert result.routes is not None
            assert len(result.routes) == 17
            assert result.versions == ((0, "initial"),)
            assert result.version_ranges == ((0, 17, "initial"),)
        assert result.cached_tokens == 16
        after = rig.run(rig.prompt(size=17, max_tokens=1))
        assert after.routes is not None
        assert result.routes is not None
        assert np.array_equal(after.routes, result.routes)

    def test_stop_token_ends_and_counts(self, rig: Rig) -> None:
        free = rig.run(rig.prompt(max_tokens=6))
        stop = int(free.token_ids[2])
        first = free.token_ids.tolist().index(stop)
        stopped = rig.run(rig.prompt(max_tokens=6, stop_token_ids=(stop,)))
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
        assert stopped.routes is not None
        assert len(stopped.routes) == 20 + first

    def test_tokens_stream_to_a_callback(self, rig: Rig) -> None:
        told: list[tuple[int, float]] = []
        result = rig.run(rig.prompt(max_tokens=6, on_token=lambda token, logprob: told.append((token, logprob))))
        assert [token for token, _ in told] == result.token_ids.tolist()
        assert np.allclose([logprob for _, logprob in told], result.logprobs)
        rig.run(rig.prompt(max_tokens=0, on_token=lambda *_: told.clear()))
        assert len(told) == 6

    def test_a_callback_may_abort_its_request(self, rig: Rig) -> None:
        told: list[int] = []

        def on_token(token: int, _: float) -> None:
            told.append(token)
            if len(told) == 3:
                assert rig.engine.abort_requests(["r"]) == ["r"]

        result = rig.run(rig.prompt(max_tokens=12, on_token=on_token))
        assert (result.finish_reason, result.token_ids.tolist()) == ("abort", told)
        assert result.routes is not None
        assert len(result.routes) == 22

    def test_a_callback_that_fails_ends_its_request_only(self, rig: Rig) -> None:
        def on_token(token: int, _: float) -> None:
            raise ConnectionError("the client went away")

        with pytest.raises(EngineFailed, match=r"on_token of 'r' raised ConnectionError: the client went away"):
            rig.run(rig.prompt(on_token=on_token))
        assert rig.engine.inspect().in_flight == 0
        assert rig.run().finish_reason == "length"

    def test_repeats_exactly_with_and_without_prefix_hits(self, rig: Rig) -> None:
        cold, warm = rig.run(), rig.run()
        assert cold.cached_tokens == 0
        assert 0 < warm.cached_tokens < 20
        assert same(cold, warm)

    def test_sampling_follows_the_seed(self, rig: Rig) -> None:
        runs = [rig.run(rig.prompt(max_tokens=16, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
        assert same(runs[0], runs[1])
        assert runs[0].token_ids.tolist() != runs[2].token_ids.tolist()

    def test_capture_can_be_left_out(self, rig: Rig) -> None:
        assert rig.run(rig.prompt(capture_routes=False)).routes is None
        result = rig.run()  # hits the blocks of the request above, whose rows are there all the same
        assert result.cached_tokens > 0
        assert result.routes is not None

    @pytest.mark.parametrize(
        ("field", "prompt"),
        [
            ("token_ids", Prompt("r", np.zeros(0, np.int64))),
            ("token_ids", Prompt("r", np.asarray([1 << 40]))),
            ("token_ids", Prompt("r", np.asarray([-1]))),
            ("max_tokens", Prompt("r", np.asarray([1]), max_tokens=-1)),
            ("max_tokens", Prompt("r", np.asarray([1]), max_tokens=1 << 30)),
            ("temperature", Prompt("r", np.asarray([1]), temperature=float("nan"))),
            ("top_p", Prompt("r", np.asarray([1]), top_p=0.0)),
            ("seed", Prompt("r", np.asarray([1]), seed=-1)),
            ("request_id", Prompt("", np.asarray([1]))),
        ],
    )
    def test_bad_prompts_name_the_field(self, rig: Rig, field: str, prompt: Prompt) -> None:
        with pytest.raises(InvalidInput) as caught:
            rig.engine.generate(prompt, 5)
        assert caught.value.field == field
        assert rig.engine.inspect().in_flight == 0

    def test_an_id_is_in_flight_once(self, rig: Rig) -> None:
        call = rig.held()
        with pytest.raises(InvalidInput, match="in flight"):
            rig.engine.generate(rig.prompt(), 5)
        rig.gate.open()
        assert call.result().finish_reason == "length"

    def test_a_request_that_takes_too_long_is_aborted(self, rig: Rig) -> None:
        rig.gate.close_after("step", 0)
        call = Background(lambda: rig.engine.generate(rig.prompt(max_tokens=12), 0.5))
        rig.gate.wait_held()
        over = time.monotonic() + 0.6
        wait_until(lambda: time.monotonic() > over, what="the end of the time allowed")
        rig.gate.open()
        with pytest.raises(EngineTimeout):
            call.result()
        wait_until(lambda: rig.engine.inspect().in_flight == 0, what="the request is gone")
        assert rig.run().finish_reason == "length"

    def test_abort_keeps_the_partial_output(self, rig: Rig) -> None:
        whole = rig.run(rig.prompt(max_tokens=12))
        call = rig.held(3)
        assert rig.engine.abort_requests(["other", "r"]) == ["r"]
        rig.gate.open()
        part = call.result()
        assert part.finish_reason == "abort"
        sampled = len(part.token_ids)
        assert 3 <= sampled <= 4
        assert part.routes is not None
        assert whole.routes is not None
        assert np.array_equal(part.token_ids, whole.token_ids[:sampled])
        assert np.array_equal(part.routes, whole.routes[: 20 + sampled - 1])
        assert rig.engine.abort_requests(None) == []

    def test_abort_before_the_prefill_has_no_rows(self, rig: Rig) -> None:
        call = rig.held(0)
        assert rig.engine.abort_requests(None) == ["r"]
        rig.gate.open()
        part = call.result()
        assert part.finish_reason == "abort"
        assert part.routes is not None
        # an engine whose step had begun finishes it: then there is one token and the rows of the prompt
        assert (len(part.token_ids), len(part.routes)) in ((0, 0), (1, 20))
