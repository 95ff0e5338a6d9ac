"""transfer_weights through the worker, with an engine that blocks in `update` until a trainer sends (design 3.4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from moebus.consumers.control import ControlWorkerHost
from moebus.engine.port import EngineFailed
from moebus.engine.simulated import Rendezvous, SimulatedEngine
from moebus.schemas.responses import Code, ControlResponse, Lifecycle, Residency, Weights
from moebus.schemas.tags import Tag
from tests.support.background import Background
from tests.support.control_lab import Lab
from tests.support.deadlines import Left
from tests.support.gate import Gate
from tests.support.wait import wait_until

TENSORS = ["embed.weight", "layers/0/experts", "head.weight"]


def meeting(tmp_path: Path) -> tuple[Rendezvous, dict[str, object]]:
    folder = tmp_path / "meeting"
    folder.mkdir()
    return Rendezvous(folder), {"rendezvous": str(folder), "tensors": [*TENSORS]}


def step(lab: Lab, name: str, info: dict[str, object] | None = None, version: str | None = "v2") -> ControlResponse:
    return lab.ask("transfer_weights", {"step": name, "version": version, "info": info or {}})


def send_all(trainer: Rendezvous, engines: int) -> None:
    """A trainer as NCCL makes it: nothing is sent before every engine is there."""
    trainer.wait_arrived(engines, Left())
    for name in TENSORS:
        trainer.send(name, name.encode())


def started(lab: Lab, *engines: SimulatedEngine) -> tuple[list[str], ControlWorkerHost]:
    """Workers w1, w2, ... in one process, paused and with an open transfer."""
    names = [f"w{number + 1}" for number in range(len(engines))]
    host = lab.host(*engines, ids=tuple(names), threads=True).start()
    wait_until(lambda: lab.health.ready() == {}, what="ready")
    for method, args in (("pause", {}), ("transfer_weights", {"step": "start", "version": "v2"})):
        request = lab.send(method, args)
        wait_until(lambda request=request: len(lab.answers(request)) == len(names), what=method)  # type: ignore[misc]
        assert {answer.code for answer in lab.answers(request)} == {Code.OK}
    return names, host


def test_a_whole_transfer(lab: Lab, tmp_path: Path) -> None:
    engine = lab.engine()
    lab.host(engine)
    trainer, info = meeting(tmp_path)
    lab.ask("pause")
    assert step(lab, "init").code is Code.OK
    begun = step(lab, "start")
    assert begun.state is not None
    assert (begun.state.lifecycle, begun.state.weights, begun.state.version) == (
        Lifecycle.UPDATING, Weights.EMPTY, None,
    )  # fmt: skip
    refused = lab.ask("resume")
    assert (refused.code, refused.message) == (Code.ILLEGAL_STATE, "weights hold nothing, a weight transfer is open")
    call = Background(lambda: send_all(trainer, 1))
    assert step(lab, "update", info).code is Code.OK
    call.result()
    assert trainer.arrived() == {engine.identity()}
    ended = step(lab, "finish")
    assert ended.state is not None
    assert (ended.code, ended.state.lifecycle, ended.state.version) == (Code.OK, Lifecycle.PAUSED, "v2")
    assert engine.inspect().weights_digest is not None
    assert lab.ask("resume", expect={"version": "v2"}).code is Code.OK


def test_update_stays_until_the_trainer_sends_and_all_workers_of_a_process_are_there_at_once(
    lab: Lab, tmp_path: Path
) -> None:
    trainer, info = meeting(tmp_path)
    engines = [lab.engine() for _ in range(3)]
    names, host = started(lab, *engines)
    try:
        request = lab.send("transfer_weights", {"step": "update", "info": info})
        trainer.wait_arrived(3, Left())  # would never happen if one waited for another
        assert lab.answers(request) == []
        status = lab.send("status")
        wait_until(lambda: len(lab.answers(status)) == 3, what="status while they wait")
        assert lab.answers(request) == []
        send_all(trainer, 3)
        wait_until(lambda: len(lab.answers(request)) == 3, what="the update")
        assert {answer.code for answer in lab.answers(request)} == {Code.OK}
        finish = lab.send("transfer_weights", {"step": "finish", "version": "v2"})
        wait_until(lambda: len(lab.answers(finish)) == 3, what="the finish")
        assert {worker: lab.answer(finish, worker).code for worker in names} == dict.fromkeys(names, Code.OK)
        assert len({engine.inspect().weights_digest for engine in engines} - {None}) == 1
    finally:
        host.stop()


@pytest.mark.parametrize("sent", [0, 2])
def test_a_transfer_cut_by_its_deadline_taints_and_only_a_good_update_heals(
    lab: Lab, tmp_path: Path, sent: int
) -> None:
    trainer, info = meeting(tmp_path)
    _, host = started(lab, lab.engine())
    try:
        for name in TENSORS[:sent]:
            trainer.send(name, b"x")
        request = lab.send("transfer_weights", {"step": "update", "info": info}, deadline_s=30)
        trainer.wait_arrived(1, Left())
        lab.clock.advance(31)
        wait_until(lambda: lab.answers(request), what="the end of the transfer")
        cut = lab.answer(request)
        assert (cut.code, cut.error_code) == (Code.TAINTED, 503)
        assert f"cut off after {sent} of 3 tensors" in cut.message
        assert f"{TENSORS[sent]!r} had not come" in cut.message
        assert cut.state is not None
        assert (cut.state.lifecycle, cut.state.version) == (Lifecycle.TAINTED, None)
        _heals_by_update_only(lab)
    finally:
        host.stop()


def _heals_by_update_only(lab: Lab) -> None:
    def ask(method: str, args: dict[str, object] | None = None) -> ControlResponse:
        request = lab.send(method, args)
        wait_until(lambda: lab.answers(request, phase=None)[-1:] and _last(request) is not None, what=method)
        found = _last(request)
        assert found is not None
        return found

    def _last(request: str) -> ControlResponse | None:
        ended = [a for a in lab.answers(request, phase=None) if str(a.phase) in ("done", "staged")]
        return ended[-1] if ended else None

    assert ask("resume").code is Code.TAINTED
    assert ask("transfer_weights", {"step": "finish", "version": "v2"}).code is Code.ILLEGAL_STATE
    assert ask("sleep", {"tags": "weight"}).code is Code.OK
    assert ask("wakeup", {"tags": "weight"}).code is Code.OK
    assert ask("resume").code is Code.TAINTED
    bad = ask("update_weights", {"version": "v3", "source": "/nowhere"})
    assert bad.code is Code.FAILED
    assert ask("resume").code is Code.TAINTED
    cure = lab.send("update_weights", {"version": "v3", "source": lab.file("v3")})
    wait_until(lambda: _last(cure) is not None, what="staged")
    lab.send("decide", {"request_id": cure, "decision": "commit"})
    wait_until(lambda: lab.answers(cure), what="the commit")
    assert lab.answer(cure).code is Code.OK
    opened = ask("resume")
    assert opened.state is not None
    assert (opened.code, opened.state.version) == (Code.OK, "v3")


def test_a_transfer_that_broke_is_healed_by_a_whole_one(lab: Lab, tmp_path: Path) -> None:
    gate = _Break(at=2)
    engine = lab.engine(gate=gate)
    lab.host(engine)
    trainer, info = meeting(tmp_path)
    for name in TENSORS:
        trainer.send(name, b"1")
    lab.ask("pause")
    step(lab, "start")
    cut = step(lab, "update", info)
    assert (cut.code, "after 1 of 3 tensors (the wire broke)" in cut.message) == (Code.TAINTED, True)
    assert engine.inspect().tainted
    assert step(lab, "update", info).code is Code.ILLEGAL_STATE
    assert [step(lab, name, info).code for name in ("start", "update", "finish")] == [Code.OK] * 3
    assert not engine.inspect().tainted
    assert lab.ask("resume").code is Code.OK


class _Break(Gate):
    """A gate whose write number `at` fails once."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def __call__(self, point: str, subject: str, deadline: object | None) -> None:
        if point == "write":
            self._at -= 1
            if self._at == 0:
                raise EngineFailed("the wire broke")


def test_steps_out_of_order_are_illegal(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    assert step(lab, "start").code is Code.ILLEGAL_STATE  # running
    lab.ask("pause")
    for name in ("update", "finish"):
        refused = step(lab, name)
        assert (refused.code, refused.message) == (Code.ILLEGAL_STATE, f"{name} without start")
    lab.ask("sleep", {"tags": "weight"})
    assert step(lab, "start").message == "weight is asleep; wake it first"
    assert engine.inspect().version is None
    assert lab.ask("wakeup", {"tags": "weight", "resume": True}).code is Code.OK
    assert engine.inspect().version == "initial"


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"rendezvous": "/etc"}, "outside the allowed weight roots"),
        ({"rendezvous": "R", "tensors": "all"}, "not a list"),
    ],
)
def test_a_bad_meeting_is_refused(lab: Lab, tmp_path: Path, info: dict[str, object], text: str) -> None:
    lab.host(lab.engine())
    lab.ask("pause")
    step(lab, "start")
    named = {name: str(tmp_path) if value == "R" else value for name, value in info.items()}
    refused = step(lab, "update", named)
    assert (refused.code, text in refused.message) == (Code.FAILED, True)
    trainer, good = meeting(tmp_path)
    for name in TENSORS:
        trainer.send(name, b"1")
    assert [step(lab, name, good).code for name in ("update", "finish")] == [Code.OK] * 2


def test_the_colocated_loop_with_a_transfer(lab: Lab, tmp_path: Path) -> None:
    engine = lab.engine()
    lab.host(engine)
    held = engine.inspect().bytes_by_tag
    for turn in range(3):
        folder = tmp_path / f"turn{turn}"
        folder.mkdir()
        trainer = Rendezvous(folder)
        info: dict[str, object] = {"rendezvous": str(folder), "tensors": ["a"]}
        assert lab.ask("sleep", {"level": "discard"}).code is Code.OK
        assert sum(engine.inspect().bytes_by_tag.values()) == 0
        woken = lab.ask("wakeup", {"tags": "weight", "weights": "empty"})
        assert woken.state is not None
        assert (woken.state.weights, woken.state.tags[Tag.KV_CACHE]) == (Weights.EMPTY, Residency.ASLEEP)
        assert lab.ask("resume").code is Code.ILLEGAL_STATE
        assert step(lab, "start", info).code is Code.OK
        trainer.send("a", bytes([turn]))
        assert step(lab, "update", info).code is Code.OK
        assert step(lab, "finish", version=f"v{turn}").code is Code.OK
        assert lab.ask("resume").message == "kv_cache is asleep"
        assert lab.ask("wakeup", {"tags": "kv_cache"}).code is Code.OK
        assert engine.inspect().paused, "waking opens no traffic"
        assert lab.ask("resume", expect={"version": f"v{turn}"}).code is Code.OK
        assert engine.inspect().bytes_by_tag == held
