"""Updates and transfers of weights over vLLM's calls, and their faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moebus.engine.port import (
    EngineFailed,
    EngineRefused,
    EngineTainted,
    EngineUnreachable,
    Unsupported,
)
from moebus.engine.simulated.rendezvous import Rendezvous
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.vllm import New, Rig
from tests.support.wait import wait_until

STEPS = ("init", "start", "update", "finish")


def transfer(rig: Rig, version: str = "v7", steps: tuple[str, ...] = STEPS, **info: Any) -> None:
    for step in steps:
        rig.engine.transfer(step, version, {"weights": "w7", **info}, Left())


def test_an_update_from_a_folder(new: New) -> None:
    rig = new()
    assert rig.engine.inspect().version == "default"
    rig.engine.pause("abort", Left())
    rig.update("v5", rig.checkpoint("w5"))
    assert rig.engine.inspect().version == rig.server.core.version == "v5"
    rig.engine.resume()
    assert rig.ask()["weights"] == "w5"
    rig.engine.pause("abort", Left())
    rig.update("v6", Path(rig.root, "w5").as_uri())
    rig.update("own")
    rig.engine.resume()
    assert rig.ask()["weights"] == "w0", "not the last path it was given"


@pytest.mark.parametrize(("cache", "left"), [("reset", False), ("recompute", False), ("keep", True)])
def test_what_an_update_does_to_the_cache(new: New, cache: str, left: bool) -> None:
    rig = new()
    call = rig.request(60, "a")
    wait_until(lambda: rig.server.core.shown[0], 30.0, "it runs")
    rig.engine.pause("keep", Left())
    rig.update("v5", rig.checkpoint("w5"), cache)
    assert bool(rig.server.core.cache) == left, "also over frozen requests"
    rig.engine.resume()
    assert call.result()["weights"] == "w5"


@pytest.mark.parametrize("source", ["missing", "outside", "relative", "file", "no tensors"])
def test_refused_sources(new: New, source: str) -> None:
    rig = new()
    folder = Path(rig.checkpoint("w5"))
    (rig.root / "none").mkdir()
    text = {
        "missing": str(rig.root / "gone"),
        "outside": "/etc",
        "relative": "w5",
        "file": str(folder / "model.safetensors"),
        "no tensors": str(rig.root / "none"),
    }[source]
    with pytest.raises(EngineRefused, match="source"):
        rig.engine.stage("v5", text, None, Left())
    assert rig.server.faults.count("/collective_rpc") == 0


def test_a_server_that_does_not_say_where_its_own_weights_are(new: New) -> None:
    rig = new()
    rig.server.faults.answer["/v1/models"] = (200, b'{"data": []}')
    with pytest.raises(EngineRefused, match="name a source"):
        rig.engine.stage("v5", None, None, Left())


def test_what_cannot_be_asked_of_it(new: New) -> None:
    rig = new()
    with pytest.raises(Unsupported, match="digest"):
        rig.engine.stage("v5", None, "0" * 32, Left())
    with pytest.raises(Unsupported, match=r"options\.rsync_config"):
        rig.engine.stage("v5", None, None, Left(), {"rsync_config": {}})
    with pytest.raises(EngineRefused, match="moebus:empty"):
        rig.engine.stage("moebus:empty", None, None, Left())


def test_commit_needs_what_stage_gave_and_a_pause(new: New) -> None:
    rig = new()
    staged = rig.engine.stage("v5", None, None, Left())
    with pytest.raises(EngineFailed, match="pause"):
        rig.engine.commit(staged, "reset", Left())
    for _ in range(2):
        rig.engine.discard(staged)
    rig.engine.pause("abort", Left())
    with pytest.raises(EngineFailed, match="stage"):
        rig.engine.commit(staged, "reset", Left())
    rig.asleep()
    with pytest.raises(EngineFailed, match="asleep"):
        rig.update("v5")


@pytest.mark.parametrize("how", ["fails", "cut", "cache"])
def test_a_load_that_breaks_taints(new: New, how: str) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    if how == "fails":
        rig.server.bugs.reload_fails = True
    elif how == "cut":
        rig.server.faults.cut["/collective_rpc"] = "after"
    else:
        rig.server.faults.answer["/reset_prefix_cache"] = (500, b"{}")
    with pytest.raises(EngineTainted):
        rig.update("v5", rig.checkpoint("w5"))
    for engine in (rig.engine, rig.restarted(notes=False)):
        found = engine.inspect()
        assert (found.tainted, found.weights_valid, found.version) == (True, False, None)
        with pytest.raises(EngineFailed, match="weights"):
            engine.resume()
    rig.server.bugs.reload_fails = False
    rig.server.faults.cut.clear()
    rig.server.faults.answer.clear()
    rig.update("v6", str(rig.root / "w5"))
    found = rig.engine.inspect()
    assert (found.tainted, found.version) == (False, "v6")


@pytest.mark.parametrize("how", ["refused", "gone"])
def test_a_load_that_never_began_leaves_the_old_weights(new: New, how: str) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    rig.server.faults.answer["/collective_rpc"] = (400, b"{}") if how == "refused" else (404, b"{}")
    with pytest.raises(EngineFailed):
        rig.update("v5")
    found = rig.engine.inspect()
    assert (found.version, found.tainted, found.weights_valid) == ("default", False, True)
    rig.engine.resume()


def test_a_transfer(new: New) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    transfer(rig, steps=("init", "start"))
    found = rig.engine.inspect()
    assert (found.version, found.weights_valid, found.tainted) == (None, False, False)
    with pytest.raises(EngineFailed, match="weights"):
        rig.engine.resume()
    transfer(rig, steps=("update", "update", "finish"))
    assert rig.engine.inspect().version == rig.server.core.version == "v7"
    rig.engine.resume()
    assert rig.ask()["weights"] == "w7"
    assert rig.server.faults.count("/update_weights") == 2


def test_an_update_blocks_until_the_trainer_has_sent(new: New, tmp_path: Path) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    folder = tmp_path / "meeting"
    folder.mkdir()
    transfer(rig, steps=("start",))
    rig.engine = rig.connect(look_s=0.5)
    call = Background(lambda: transfer(rig, steps=("update",), rendezvous=str(folder), tensors=["t"]))
    meeting = Rendezvous(folder)
    meeting.wait_arrived(1, Left())
    assert not call.done
    assert rig.engine.inspect().paused, "answered while the core is taken up"
    meeting.send("t", b"1")
    call.result()
    transfer(rig, steps=("finish",))


def test_a_second_start_begins_anew(new: New) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    transfer(rig, steps=("start", "update", "start"))
    found = rig.engine.inspect()
    assert (found.version, found.weights_valid, found.tainted) == (None, False, False)
    transfer(rig, steps=("update", "finish"))
    assert rig.engine.inspect().version == "v7"


def test_somebody_elses_update_is_left_alone(new: New) -> None:
    """SkyRL#1605: two drivers of one engine."""
    rig = new()
    rig.engine.pause("abort", Left())
    core = rig.server.core
    core.call(core.start_update).result(30.0)
    with pytest.raises(EngineFailed, match="Internal Server Error"):
        transfer(rig, steps=("start",))
    assert core.updating
    found = rig.engine.inspect()
    assert (found.version, found.tainted) == ("default", False)


def test_what_the_server_refuses_before_any_effect(new: New) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    rig.server.faults.answer["/start_weight_update"] = (400, b'{"error": "no transfer config"}')
    with pytest.raises(EngineRefused, match="no transfer config"):
        transfer(rig, steps=("start",))
    assert rig.engine.inspect().version == "default"
    rig.server.faults.answer = {"/init_weight_transfer_engine": (404, b"{}")}
    with pytest.raises(Unsupported, match="--weight-transfer-config"):
        transfer(rig, steps=("init",))


@pytest.mark.parametrize(
    ("step", "how"),
    [(step, how) for step in STEPS[1:] for how in ("cut", "late", "500") if (step, how) != ("finish", "late")],
)
def test_a_transfer_that_breaks_taints(new: New, step: str, how: str) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    before = STEPS[: STEPS.index(step)]
    transfer(rig, steps=before)
    path = {"start": "/start_weight_update", "update": "/update_weights", "finish": "/finish_weight_update"}[step]
    if how == "cut":
        rig.server.faults.cut[path] = "before"
    elif how == "late":
        rig.server.faults.hold.add(path)
    else:
        rig.server.faults.answer[path] = (500, b"{}")
    expected = EngineFailed if (step, how) == ("start", "500") else EngineTainted
    with pytest.raises(expected):
        rig.engine.transfer(step, "v7", {}, Left(0.1 if how == "late" else 30.0))
    found = rig.engine.inspect()
    assert found.tainted == (expected is EngineTainted)
    assert (found.version == "default") == (expected is EngineFailed)
    rig.server.faults.clear()
    if how == "cut":
        rig.restarted(notes=False)
    transfer(rig, "v8")
    assert rig.engine.inspect().version == "v8", "what the broken one left open does not stand in the way"


@pytest.mark.parametrize("how", ["cut", "late"])
def test_a_finish_whose_answer_is_lost_is_proven_by_the_version(new: New, how: str) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    transfer(rig, steps=("start", "update"))
    if how == "cut":
        rig.server.faults.cut["/finish_weight_update"] = "after"
    else:
        rig.server.faults.hold.add("/finish_weight_update")
    rig.engine.transfer("finish", "v7", {}, Left(0.2 if how == "late" else 30.0))
    found = rig.engine.inspect()
    assert (found.version, found.tainted) == ("v7", False)


def test_a_worker_that_restarts_in_a_transfer(new: New) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    transfer(rig, steps=("init", "start"))
    rig.restarted(notes=True)
    assert not rig.engine.inspect().tainted
    transfer(rig, steps=("update",))
    rig.restarted(notes=False)
    assert rig.engine.inspect().tainted, "nobody knows how far it came"
    transfer(rig, steps=("finish",))
    assert rig.engine.inspect().version == "v7"


def test_a_server_that_restarts_in_a_transfer_has_its_first_weights(new: New) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    transfer(rig, steps=("init", "start", "update"))
    rig.server.restart()
    found = rig.engine.inspect()
    assert (found.version, found.tainted, found.paused) == ("default", False, False)


def test_a_server_without_labels(new: New) -> None:
    """What it does not tell is believed of one life, and of one worker."""
    rig = new(no_labels=True)
    assert rig.engine.inspect().version is None
    rig.engine.pause("abort", Left())
    rig.update("v5", rig.checkpoint("w5"))
    assert rig.engine.inspect().version == "v5"
    transfer(rig)
    assert rig.engine.inspect().version == "v7"
    assert rig.restarted(notes=True).inspect().version == "v7"
    stranger = rig.restarted(notes=False)
    found = stranger.inspect()
    assert (found.version, found.weights_valid, any(found.resident.values())) == (None, False, False), "it may sleep"
    for tag in found.resident:
        stranger.wakeup(tag, "empty", Left())
    found = stranger.inspect()
    assert (found.version, found.weights_valid, all(found.resident.values())) == (None, False, True)
    rig.update("v8", str(rig.root / "w5"))
    assert stranger.inspect().version == "v8"
    rig.server.restart()
    assert rig.engine.inspect().version is None


def test_identity_of_several_api_servers_goes_with_the_connection(new: New) -> None:
    rig = new(several_api_servers=True)
    first = rig.engine.identity()
    assert rig.engine.identity() == first
    assert rig.restarted().identity() != first
    second = rig.engine.identity()
    rig.server.kill()
    with pytest.raises(EngineUnreachable):
        rig.engine.inspect()
    rig.server.boot()
    assert rig.engine.identity() != second
