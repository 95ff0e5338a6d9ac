"""The rules of the Engine port, for every engine in this process.

A subclass gives `new_rig`; a rig is one engine with a gate in its hook and a way to write weight files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.port import (
    EngineClosed,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    GeneratingEngine,
    Generation,
    Level,
    PauseMode,
    Prompt,
)
from moebus.schemas.errors import InvalidInput
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.gate import Gate
from tests.support.wait import wait_until

LEVELS: tuple[Level, ...] = ("offload", "discard")
MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


@dataclass
class Rig:
    """An engine under test. `write_weights(path, seed)` makes a good source; `moe_layers`, `top_k` of its routes."""

    engine: GeneratingEngine
    gate: Gate
    root: Path
    write_weights: Callable[[Path, int], None]
    moe_layers: int
    top_k: int
    started: list[Background[Generation]] = field(default_factory=list)

    def prompt(self, request_id: str = "r", size: int = 20, max_tokens: int = 6, **kwargs: object) -> Prompt:
        tokens = (np.arange(size, dtype=np.int64) * 7 + 3) % 101
        return Prompt(request_id, tokens, max_tokens=max_tokens, **kwargs)  # type: ignore[arg-type]

    def run(self, prompt: Prompt | None = None) -> Generation:
        return self.engine.generate(prompt or self.prompt(), 30.0)

    def start(self, prompt: Prompt) -> Background[Generation]:
        self.started.append(Background(lambda: self.engine.generate(prompt, 30.0)))
        return self.started[-1]

    def held(self, steps: int = 3, prompt: Prompt | None = None) -> Background[Generation]:
        """A request that has done `steps` steps and is held before its next one."""
        self.gate.close_after("step", steps)
        call = self.start(prompt or self.prompt(max_tokens=12))
        self.gate.wait_held()
        return call

    def frozen(self) -> Background[Generation]:
        """A request frozen by `keep` after 3 to 4 steps; the engine is paused."""
        call = self.held()
        pause = Background(lambda: self.engine.pause("keep", Left()))
        wait_until(lambda: self.engine.inspect().paused, what="admission closed")
        self.gate.open()
        assert pause.result().frozen == 1
        return call

    def update(self, version: str, source: Path | None, **kwargs: object) -> None:
        staged = self.engine.stage(version, None if source is None else str(source), None, Left())
        self.engine.commit(staged, kwargs.get("cache", "reset"), Left())  # type: ignore[arg-type]


def same(one: Generation, other: Generation) -> bool:
    assert one.routes is not None
    assert other.routes is not None
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.routes, other.routes)


class EngineSuite:
    """Subclass as `Test...` with `new_rig`."""

    def new_rig(self, root: Path) -> Rig:
        raise NotImplementedError

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        rig = self.new_rig(tmp_path)
        yield rig
        rig.gate.open()
        rig.engine.close()
        for call in rig.started:
            wait_until(lambda call=call: call.done, what="a request ended by close")  # type: ignore[misc]

    # -- generation

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

    def test_stop_token_ends_and_counts(self, rig: Rig) -> None:
        free = rig.run(rig.prompt(max_tokens=6))
        stop = int(free.token_ids[2])
        first = free.token_ids.tolist().index(stop)
        stopped = rig.run(rig.prompt(max_tokens=6, stop_token_ids=(stop,)))
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
        assert stopped.routes is not None
        assert len(stopped.routes) == 20 + first

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
            ("max_tokens", Prompt("r", np.asarray([1]), max_tokens=0)),
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
        rig.gate.close_after("step", 2)
        call = Background(lambda: rig.engine.generate(rig.prompt(max_tokens=12), 0.05))
        rig.gate.wait_held()
        over = time.monotonic() + 0.06
        wait_until(lambda: time.monotonic() > over, what="the end of the time allowed")
        rig.gate.open()
        with pytest.raises(EngineTimeout):
            call.result()
        wait_until(lambda: rig.engine.inspect().in_flight == 0, what="the request is gone")
        assert rig.run().finish_reason == "length"

    # -- abort

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

    # -- pause and resume

    @pytest.mark.parametrize("mode", MODES)
    def test_pause_closes_admission_and_repeats(self, rig: Rig, mode: PauseMode) -> None:
        for _ in range(2):
            result = rig.engine.pause(mode, Left())
            assert (result.aborted, result.finished, result.frozen) == (0, 0, 0)
            assert result.idle_confirmed
            assert rig.engine.inspect().paused
            with pytest.raises(EngineClosed):
                rig.run()
        rig.engine.resume()
        rig.engine.resume()
        assert not rig.engine.inspect().paused
        assert rig.run().finish_reason == "length"

    def test_pause_abort_ends_what_runs(self, rig: Rig) -> None:
        call = rig.held()
        pause = Background(lambda: rig.engine.pause("abort", Left()))
        wait_until(lambda: rig.engine.inspect().paused, what="admission closed")
        rig.gate.open()
        assert pause.result().aborted == 1
        assert call.result().finish_reason == "abort"
        assert rig.engine.inspect().in_flight == 0

    def test_pause_wait_lets_it_finish(self, rig: Rig) -> None:
        call = rig.held()
        pause = Background(lambda: rig.engine.pause("wait", Left()))
        wait_until(lambda: rig.engine.inspect().paused, what="admission closed")
        rig.gate.open()
        assert pause.result().finished == 1
        assert call.result().finish_reason == "length"

    def test_pause_keep_freezes_and_resume_goes_on(self, rig: Rig) -> None:
        whole = rig.run(rig.prompt(max_tokens=12))
        call = rig.frozen()
        state = rig.engine.inspect()
        assert (state.in_flight, state.frozen) == (1, 1)
        assert rig.engine.pause("keep", Left()).frozen == 1
        assert not call.done
        rig.engine.resume()
        assert same(call.result(), whole)

    @pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
    def test_frozen_requests_can_be_drained(self, rig: Rig, mode: PauseMode, reason: str) -> None:
        call = rig.frozen()
        result = rig.engine.pause(mode, Left())
        assert result.frozen == 0
        assert result.aborted + result.finished == 1
        assert call.result().finish_reason == reason
        assert rig.engine.inspect().paused

    def test_frozen_requests_can_be_aborted_by_id(self, rig: Rig) -> None:
        call = rig.frozen()
        assert rig.engine.abort_requests(["r"]) == ["r"]
        assert call.result().finish_reason == "abort"

    @pytest.mark.parametrize("mode", MODES)
    def test_a_pause_in_vain_opens_admission_again(self, rig: Rig, mode: PauseMode) -> None:
        call = rig.held()
        with pytest.raises(EngineTimeout):
            rig.engine.pause(mode, Left(0.02))
        assert not rig.engine.inspect().paused
        rig.gate.open()
        call.result()
        assert rig.run(rig.prompt("again")).finish_reason == "length"
        assert rig.engine.pause(mode, Left()).idle_confirmed

    def test_inspect_is_quick_during_a_step(self, rig: Rig) -> None:
        call = rig.held()
        begun = time.monotonic()
        state = rig.engine.inspect()
        rig.engine.identity()
        rig.engine.capabilities()
        assert time.monotonic() - begun < 1.0
        assert state.in_flight == 1
        rig.gate.open()
        call.result()

    def test_memory_is_left_alone_while_serving(self, rig: Rig) -> None:
        before = rig.engine.inspect()
        staged = rig.engine.stage("next", None, None, Left())
        for refused in (
            lambda: rig.engine.sleep(Tag.KV_CACHE, "discard", Left()),
            lambda: rig.engine.sleep(Tag.WEIGHT, "discard", Left()),
            lambda: rig.engine.commit(staged, "reset", Left()),
        ):
            with pytest.raises(EngineFailed, match="pause"):
                refused()
        assert rig.engine.inspect() == before

    # -- sleep and wake

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("tag", ALL_TAGS)
    def test_five_cycles_leave_bytes_and_results_alone(self, rig: Rig, tag: Tag, level: Level) -> None:
        cold = rig.run()
        before = rig.engine.inspect()
        for _ in range(5):
            rig.engine.pause("abort", Left())
            held = rig.engine.inspect().bytes_by_tag[tag]
            assert held > 0
            assert rig.engine.sleep(tag, level, Left()) == held
            asleep = rig.engine.inspect()
            assert asleep.bytes_by_tag[tag] == 0
            assert not asleep.resident[tag]
            assert rig.engine.sleep(tag, level, Left()) == 0
            with pytest.raises(EngineFailed, match=str(tag)):
                rig.engine.resume()
            assert rig.engine.wakeup(tag, "restore", Left()) == held
            assert rig.engine.wakeup(tag, "restore", Left()) == 0
            assert rig.engine.inspect().paused
            rig.engine.resume()
        assert rig.engine.inspect() == before
        assert same(rig.run(), cold)

    def test_sleeping_weights_have_no_version(self, rig: Rig) -> None:
        rig.engine.pause("abort", Left())
        rig.engine.sleep(Tag.WEIGHT, "offload", Left())
        state = rig.engine.inspect()
        assert (state.version, state.weights_digest, state.weights_valid) == (None, None, False)
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        state = rig.engine.inspect()
        assert (state.version, state.weights_valid) == ("initial", True)

    def test_a_sleeping_cache_forgets_its_prefixes(self, rig: Rig) -> None:
        rig.run()
        rig.engine.pause("abort", Left())
        rig.engine.sleep(Tag.KV_CACHE, "offload", Left())
        rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
        rig.engine.resume()
        assert rig.run().cached_tokens == 0

    def test_the_cache_of_frozen_requests_stays(self, rig: Rig) -> None:
        call = rig.frozen()
        with pytest.raises(EngineFailed, match="frozen"):
            rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
        rig.engine.sleep(Tag.WEIGHT, "offload", Left())
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        rig.engine.resume()
        assert call.result().finish_reason == "length"

    def test_woken_empty_is_resident_and_not_valid(self, rig: Rig) -> None:
        cold = rig.run()
        rig.engine.pause("abort", Left())
        freed = rig.engine.sleep(Tag.WEIGHT, "discard", Left())
        assert rig.engine.wakeup(Tag.WEIGHT, "empty", Left()) == freed
        state = rig.engine.inspect()
        assert state.resident[Tag.WEIGHT]
        assert (state.weights_valid, state.version) == (False, None)
        with pytest.raises(EngineFailed):
            rig.engine.resume()
        with pytest.raises(EngineClosed):
            rig.run()
        rig.update("again", None)
        rig.engine.resume()
        assert rig.engine.inspect().version == "again"
        assert rig.run().routes is not None
        assert cold.versions == ((0, "initial"),)

    def test_restore_comes_from_the_committed_source(self, rig: Rig) -> None:
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 5)
        rig.engine.pause("abort", Left())
        rig.update("v5", path)
        digest = rig.engine.inspect().weights_digest
        rig.engine.sleep(Tag.WEIGHT, "discard", Left())
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        state = rig.engine.inspect()
        assert (state.version, state.weights_digest) == ("v5", digest)

    @pytest.mark.parametrize("change", ["gone", "changed"])
    def test_restore_fails_without_the_committed_source(self, rig: Rig, change: str) -> None:
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 5)
        rig.engine.pause("abort", Left())
        rig.update("v5", path)
        rig.engine.sleep(Tag.WEIGHT, "discard", Left())
        path.unlink()
        if change == "changed":
            rig.write_weights(path, 6)
        with pytest.raises(EngineFailed):
            rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        state = rig.engine.inspect()
        assert not state.resident[Tag.WEIGHT]
        assert state.bytes_by_tag[Tag.WEIGHT] == 0

    # -- weights

    def test_commit_changes_version_digest_and_results(self, rig: Rig) -> None:
        cold = rig.run()
        old = rig.engine.inspect()
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 9)
        staged = rig.engine.stage("v9", path.as_uri(), None, Left())
        assert rig.engine.inspect() == old  # staged while serving; nothing changes yet
        assert same(rig.run(rig.prompt()), cold)
        rig.engine.pause("abort", Left())
        rig.engine.commit(staged, "reset", Left())
        rig.engine.resume()
        state = rig.engine.inspect()
        assert state.version == "v9"
        assert state.weights_digest == staged.weights_digest
        assert state.weights_digest not in (None, old.weights_digest)
        new = rig.run()
        assert new.cached_tokens == 0
        assert new.versions == ((0, "v9"),)
        assert not same(new, cold)

    def test_commit_needs_what_stage_gave(self, rig: Rig) -> None:
        staged = rig.engine.stage("v1", None, None, Left())
        rig.engine.discard(staged)
        rig.engine.discard(staged)
        rig.engine.pause("abort", Left())
        with pytest.raises(EngineFailed, match="stage"):
            rig.engine.commit(staged, "reset", Left())
        assert rig.engine.inspect().version == "initial"

    def test_commit_over_sleeping_weights_fails(self, rig: Rig) -> None:
        staged = rig.engine.stage("v1", None, None, Left())
        rig.engine.pause("abort", Left())
        rig.engine.sleep(Tag.WEIGHT, "offload", Left())
        with pytest.raises(EngineFailed, match="asleep"):
            rig.engine.commit(staged, "reset", Left())

    @pytest.mark.parametrize("source", ["missing", "outside", "escaping", "relative", "https"])
    def test_refused_sources_leave_the_old_weights(self, rig: Rig, source: str) -> None:
        text = {
            "missing": str(rig.root / "none.safetensors"),
            "outside": "/etc/hostname",
            "escaping": str(rig.root / ".." / ".." / ".." / "etc" / "hostname"),
            "relative": "w.safetensors",
            "https": "https://127.0.0.1/w.safetensors",
        }[source]
        before = rig.engine.inspect()
        with pytest.raises(EngineRefused, match="source"):
            rig.engine.stage("v1", text, None, Left())
        assert rig.engine.inspect() == before
        assert rig.run().versions == ((0, "initial"),)

    def test_a_link_out_of_the_roots_is_refused(self, rig: Rig) -> None:
        link = rig.root / "link.safetensors"
        link.symlink_to("/etc/hostname")
        with pytest.raises(EngineRefused, match="outside"):
            rig.engine.stage("v1", str(link), None, Left())

    def test_the_digest_is_checked(self, rig: Rig) -> None:
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 3)
        found = rig.engine.stage("v3", str(path), None, Left()).weights_digest
        assert found is not None
        assert rig.engine.stage("v3", str(path), found.upper(), Left()).weights_digest == found
        with pytest.raises(EngineRefused, match="digest"):
            rig.engine.stage("v3", str(path), "0" * 32, Left())

    def test_the_same_weights_have_the_same_digest(self, rig: Rig) -> None:
        for name in ("a.safetensors", "b.safetensors"):
            folder = rig.root / name.removesuffix(".safetensors")
            folder.mkdir()
            rig.write_weights(folder / "w.safetensors", 3)
        digests = {rig.engine.stage("v", str(rig.root / name), None, Left()).weights_digest for name in ("a", "b")}
        assert len(digests) == 1

    def test_frozen_requests_go_on_under_new_weights(self, rig: Rig) -> None:
        whole = rig.run(rig.prompt(max_tokens=12))
        rig.engine.reset_cache()
        call = rig.frozen()
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 9)
        rig.update("v9", path)
        rig.engine.resume()
        result = call.result()
        (first, old), (start, new) = result.versions
        assert (first, old, new) == (0, "initial", "v9")
        assert 22 <= start <= 23  # 3 or 4 steps were done
        assert result.routes is not None
        assert whole.routes is not None
        assert len(result.routes) == 31
        assert np.array_equal(result.routes[:start], whole.routes[:start])
        after = rig.run(rig.prompt(max_tokens=12))
        assert after.versions == ((0, "v9"),)
        assert after.cached_tokens == 0

    def test_a_kept_cache_tells_its_version(self, rig: Rig) -> None:
        old = rig.run()
        rig.engine.pause("abort", Left())
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 9)
        rig.update("v9", path, cache="keep")
        rig.engine.resume()
        new = rig.run()
        assert new.cached_tokens > 0
        assert new.versions == ((0, "initial"), (new.cached_tokens, "v9"))
        assert new.routes is not None
        assert old.routes is not None
        assert np.array_equal(new.routes[: new.cached_tokens], old.routes[: new.cached_tokens])

    # -- cache, deadlines, end

    def test_reset_cache_drops_prefixes_also_while_serving(self, rig: Rig) -> None:
        rig.run()
        assert rig.engine.reset_cache() > 0
        assert rig.engine.reset_cache() == 0
        assert rig.run().cached_tokens == 0

    def test_a_passed_deadline_has_no_effect(self, rig: Rig) -> None:
        rig.engine.pause("abort", Left())
        before = rig.engine.inspect()
        for late in (
            lambda: rig.engine.sleep(Tag.WEIGHT, "offload", Left(-1)),
            lambda: rig.engine.sleep(Tag.KV_CACHE, "offload", Left(-1)),
            lambda: rig.engine.stage("v", None, None, Left(-1)),
        ):
            with pytest.raises(EngineTimeout):
                late()
        assert rig.engine.inspect() == before

    def test_identity_is_of_one_engine(self, rig: Rig, tmp_path: Path) -> None:
        other = self.new_rig(tmp_path)
        try:
            assert rig.engine.identity() == rig.engine.identity()
            assert rig.engine.identity() != other.engine.identity()
        finally:
            other.engine.close()

    def test_close_ends_requests_and_repeats(self, rig: Rig) -> None:
        call = rig.held()
        closing = Background(rig.engine.close)
        rig.gate.open()
        closing.result()
        assert call.result().finish_reason in ("abort", "length")
        rig.engine.close()
        with pytest.raises(EngineClosed, match="shut down"):
            rig.run()
