"""update_weights through the worker: every source, over engines that stage fully, partly and not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from moebus.engine.port import StageKind
from moebus.engine.simulated import SimulatedEngine
from moebus.schemas.responses import Code, ControlResponse, Lifecycle, Phase
from tests.support.control_lab import Lab
from tests.support.remote import ROOT, needs_fsspec, remove, upload

KINDS: tuple[StageKind, ...] = ("loaded", "validated", "none")
SOURCES = ("file", "url of a file", "directory", pytest.param("fsspec", marks=needs_fsspec), "own")


def paused(lab: Lab, tmp_path: Path, kind: StageKind) -> SimulatedEngine:
    engine = SimulatedEngine(stage=kind, allowed_roots=(str(tmp_path), ROOT), clock=lab.clock.monotonic)
    lab.host(engine)
    assert lab.ask("pause").code is Code.OK
    return engine


def stage(lab: Lab, source: str | None, **args: object) -> ControlResponse:
    return lab.ask("update_weights", {"version": "v2", "source": source, **args}, id="up")


def make(tmp_path: Path, kind: str, content: bytes = b"weights") -> str | None:
    folder = tmp_path / "step-2"
    folder.mkdir(exist_ok=True)
    for name in ("0.safetensors", "1.safetensors"):
        (folder / name).write_bytes(content + name.encode())
    named = {
        "file": str(folder / "0.safetensors"),
        "url of a file": (folder / "0.safetensors").as_uri(),
        "directory": str(folder),
        "own": None,
    }
    return upload(folder) if kind == "fsspec" else named[kind]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_source_over_every_kind(lab: Lab, tmp_path: Path, kind: StageKind, source: str) -> None:
    engine = paused(lab, tmp_path, kind)
    before = engine.inspect()
    staged = stage(lab, make(tmp_path, source))
    assert (staged.phase, staged.code) == (Phase.STAGED, Code.OK)
    assert staged.result is not None
    assert staged.result["staged"] == kind
    assert ("weights_digest" in staged.result) == (kind != "none")
    assert engine.inspect() == before, "nothing is written before the decision"
    lab.decide("up")
    done = lab.answer("up")
    assert (done.phase, done.code) == (Phase.DONE, Code.OK)
    assert done.result is not None
    assert done.result["weights_digest"] == engine.inspect().weights_digest
    assert staged.result.get("weights_digest", done.result["weights_digest"]) == done.result["weights_digest"]
    assert lab.ask("resume", expect={"version": "v2"}).code is Code.OK
    # and the weights come back from where they came from
    assert lab.ask("sleep", {"tags": "weight", "level": "discard"}).code is Code.OK
    assert lab.ask("wakeup", {"tags": "weight", "resume": True}).code is Code.OK
    assert engine.inspect().version == "v2"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["gone", "changed"])
def test_a_source_that_changes_between_stage_and_decision(
    lab: Lab, tmp_path: Path, kind: StageKind, change: str
) -> None:
    engine = paused(lab, tmp_path, kind)
    source = make(tmp_path, "file")
    assert source is not None
    stage(lab, source)
    Path(source).unlink()
    if change == "changed":
        Path(source).write_bytes(b"other weights")
    lab.decide("up")
    done = lab.answer("up")
    follows = kind == "loaded" or (kind == "none" and change == "changed")
    assert done.code is (Code.OK if follows else Code.BEHIND)
    assert done.state is not None
    if follows:
        assert (done.state.lifecycle, done.state.version) == (Lifecycle.PAUSED, "v2")
        return
    assert (done.state.lifecycle, done.state.version) == (Lifecycle.BEHIND, "initial"), "memory is whole"
    assert "was not written" in done.message
    assert lab.ask("resume").code is Code.BEHIND
    assert engine.inspect().version == "initial"


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_that_differs_is_refused_before_the_first_write(lab: Lab, tmp_path: Path, kind: StageKind) -> None:
    engine = paused(lab, tmp_path, kind)
    answer = stage(lab, make(tmp_path, "directory"), digest="0" * 32)
    if kind == "none":  # it is looked at with the commit only
        lab.decide("up")
        answer = lab.answer("up")
    assert answer.code is (Code.BEHIND if kind == "none" else Code.FAILED)
    assert "digest" in answer.message
    assert engine.inspect().version == "initial"


@pytest.mark.parametrize("kind", KINDS)
def test_a_void_leaves_the_old_weights_serving(lab: Lab, tmp_path: Path, kind: StageKind) -> None:
    engine = paused(lab, tmp_path, kind)
    before = engine.inspect()
    stage(lab, make(tmp_path, "file"))
    lab.decide("up", "void")
    done = lab.answer("up")
    assert (done.code, done.message) == (Code.FAILED, "voided")
    assert engine.inspect() == before
    assert lab.ask("resume").code is Code.OK


@needs_fsspec
def test_a_remote_source_that_went_away_fails_the_wake_of_that_tag(lab: Lab, tmp_path: Path) -> None:
    paused(lab, tmp_path, "loaded")
    url = make(tmp_path, "fsspec")
    assert url is not None
    stage(lab, url)
    lab.decide("up")
    lab.ask("sleep", {"level": "discard"})
    remove(url)
    woken = lab.ask("wakeup")
    assert woken.code is Code.PARTIAL
    assert "cannot be restored" in woken.message
    assert lab.ask("resume").message == "weight is asleep"


@pytest.mark.parametrize(
    "source", ["/etc/hostname", "s3://elsewhere/w", "memory://moebus-tests/../etc", "memory://moebus-tests-other/w"]
)
def test_sources_outside_the_roots(lab: Lab, tmp_path: Path, source: str) -> None:
    engine = paused(lab, tmp_path, "loaded")
    before = engine.inspect()
    assert stage(lab, source).code is Code.FAILED
    assert engine.inspect() == before
