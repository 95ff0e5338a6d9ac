"""The trainer's side of a weight transfer, against a rendezvous that deadlocks if anybody waits in line."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics, ensure
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.port import Engine, EngineTimeout
from moebus.engine.simulated import Rendezvous, SimulatedEngine
from moebus.engine.vllm import VllmEngine
from moebus.observability.health import Health
from moebus.producers import ControlClient, FleetError, TransferBroken, WeightTransferClient
from moebus.schemas.control import Expect
from moebus.schemas.errors import InvalidInput
from moebus.schemas.responses import Code
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.stand_ins.vllm import VllmStandIn
from tests.support.stand_ins.vllm_core import Bugs
from tests.support.wait import wait_until

TOPICS = Topics("t")
TENSORS = ["embed.weight", "head.weight"]


@dataclass
class World:
    """A fleet whose workers live in one process, and a controller."""

    broker: MemoryBroker
    control: ControlClient
    root: Path
    hosts: list[ControlWorkerHost] = field(default_factory=list)

    def fleet(self, *engines: Engine, names: Sequence[str] = ("w1", "w2")) -> list[str]:
        names = [*names[: len(engines)]]
        health = Health()
        specs = [WorkerSpec(name, engine) for name, engine in zip(names, engines, strict=True)]
        self.hosts.append(ControlWorkerHost(self.broker, TOPICS, specs, health=health, grace=1.0).start())
        wait_until(lambda: health.ready() == {}, 30.0, "the fleet")
        wait_until(lambda: len(self.control.workers()) == len(names), 30.0, "the members")
        self.control.pause()
        return names

    def simulated(self, count: int = 2) -> list[SimulatedEngine]:
        engines = [SimulatedEngine(allowed_roots=(str(self.root),)) for _ in range(count)]
        self.fleet(*engines)
        return engines

    def meeting(self, name: str = "meeting") -> tuple[Rendezvous, dict[str, Any]]:
        folder = self.root / name
        folder.mkdir()
        return Rendezvous(folder), {"rendezvous": str(folder), "tensors": [*TENSORS]}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    broker = MemoryBroker()
    ensure(broker.admin(), TOPICS)
    with ControlClient(broker, TOPICS, issuer="trainer") as control:
        made = World(broker, control, tmp_path)
        yield made
        for host in made.hosts:
            host.stop()
    broker.close()


def broadcast(meeting: Rendezvous, engines: int, seconds: float = 30.0) -> None:
    """The trainer's part: as NCCL has it, nothing is sent before everybody is there."""
    meeting.wait_arrived(engines, Left(seconds))
    for name in TENSORS:
        meeting.send(name, name.encode())


def test_a_round_of_two_workers_in_one_process(world: World) -> None:
    engines = world.simulated(2)
    meeting, info = world.meeting()
    transfer = WeightTransferClient(world.control, version="step-1", timeout=30.0)
    with transfer.init({"backend": "folder"}):
        pass
    transfer.start()
    with transfer.update(info) as step:
        broadcast(meeting, 2)
        assert 0 < step.remaining() <= 30
    assert [outcome.status for outcome in step.outcomes] == ["ok"]
    with pytest.raises(RuntimeError, match="once"):
        step.__enter__()
    transfer.finish()
    assert {engine.inspect().version for engine in engines} == {"step-1"}
    assert len({engine.inspect().weights_digest for engine in engines}) == 1
    assert world.control.resume(expect=Expect(version="step-1")).ok


def test_a_trainer_that_waits_for_the_answers_first_gets_none(world: World) -> None:
    """Why the block is there: the engines stay in `update` until the trainer has joined."""
    world.simulated(1)
    meeting, info = world.meeting()
    transfer = WeightTransferClient(world.control, version="step-1", timeout=0.4)
    transfer.start()
    with pytest.raises(FleetError, match=r"tainted|no answer"):
        world.control.transfer_weights("update", info=info, timeout=0.4)
    assert meeting.arrived(), "it was there and waited"


def test_vllms_names_with_a_trainer_that_calls_them_from_a_thread(world: World) -> None:
    engines = world.simulated(2)
    meeting, info = world.meeting()
    client = WeightTransferClient(world.control, timeout=30.0)
    client.init_weight_transfer_engine({"backend": "folder"})
    client.start_weight_update()
    call = Background(lambda: client.update_weights(info))
    broadcast(meeting, 2)
    call.result()
    client.finish_weight_update("step-2")
    assert {engine.inspect().version for engine in engines} == {"step-2"}
    with pytest.raises(InvalidInput, match="version"):
        client.finish_weight_update()


def test_a_worker_that_fails_ends_the_trainers_collective(world: World) -> None:
    engines = world.simulated(2)
    _, info = world.meeting()
    ended, reasons = threading.Event(), list[str]()

    def abort(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    transfer = WeightTransferClient(world.control, version="v", timeout=30.0, grace=0.3, abort=abort)
    transfer.start()
    engines[0].hook = _breaks

    def joined() -> None:
        with transfer.update(info) as step:
            assert ended.wait(30.0), "the other worker and this trainer would wait for ever"
            assert step.reason is not None
            raise ConnectionError("the communicator was closed")

    with pytest.raises(TransferBroken, match="w1 answered tainted") as caught:
        joined()
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert caught.value.outcome.missing == ("w2",), "it waits for the rest of the trainer's tensors"
    assert len(reasons) == 1
    assert "w1 answered tainted" in reasons[0]


def _breaks(point: str, subject: str, deadline: object) -> None:
    if point == "write":
        raise RuntimeError("out of memory")


def test_a_trainer_that_fails_ends_the_workers(world: World) -> None:
    engines = world.simulated(2)
    meeting, info = world.meeting()
    reasons: list[str] = []
    transfer = WeightTransferClient(world.control, version="v", timeout=1.0, grace=0.2, abort=reasons.append)
    transfer.start()

    def joined() -> None:
        with transfer.update(info):
            meeting.wait_arrived(2, Left())
            raise ZeroDivisionError("the trainer's own")

    with pytest.raises(ZeroDivisionError):
        joined()
    assert reasons == ["the trainer failed: ZeroDivisionError: the trainer's own"]
    wait_until(lambda: all(engine.inspect().tainted for engine in engines), 30.0, "the workers gave up")
    with pytest.raises(FleetError, match="tainted"):
        world.control.resume()


def test_a_worker_that_never_comes_ends_at_the_deadline(world: World) -> None:
    world.simulated(1)
    meeting, info = world.meeting()
    ended = threading.Event()
    transfer = WeightTransferClient(
        world.control, version="v", timeout=0.4, grace=0.1, abort=lambda reason: ended.set()
    )
    transfer.start()

    def join() -> None:
        """Waits for two engines; there is one."""
        while not ended.is_set():
            try:
                meeting.wait_arrived(2, Left(0.05))
            except EngineTimeout:
                continue
        raise ConnectionError("the communicator was closed")

    with pytest.raises(TransferBroken) as caught, transfer.update(info):
        join()
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_nobody_there(world: World) -> None:
    entered = []
    transfer = WeightTransferClient(world.control, target="role=none", version="v", timeout=5.0)
    with pytest.raises(FleetError, match="no live worker"), transfer.update({"names": []}):
        entered.append("the trainer would wait for nobody")
    assert not entered


def test_an_info_for_each_worker(world: World) -> None:
    engines = world.simulated(2)
    meetings = {name: world.meeting(name) for name in ("w1", "w2")}
    transfer = WeightTransferClient(world.control, version="v", timeout=30.0)
    transfer.start()
    with transfer.update(per_worker={name: info for name, (_, info) in meetings.items()}) as step:
        for meeting, _ in meetings.values():
            broadcast(meeting, 1)
    assert {worker for outcome in step.outcomes for worker in outcome.responses} == {"w1", "w2"}
    transfer.finish()
    assert len({engine.inspect().weights_digest for engine in engines}) == 1
    assert [meeting.arrived() for meeting, _ in meetings.values()] == [{engine.identity()} for engine in engines]
    with pytest.raises(InvalidInput, match="info"):
        transfer.update()
    with pytest.raises(InvalidInput, match="info"):
        transfer.update({}, per_worker={"w1": {}})


def test_half_of_a_step_that_cannot_be_published_is_given_up(world: World) -> None:
    engines = world.simulated(2)
    _, info = world.meeting()
    transfer = WeightTransferClient(world.control, version="v", timeout=0.6)
    transfer.start()
    with pytest.raises(InvalidInput), transfer.update(per_worker={"w1": info, "w2": {"handle": object()}}):
        raise AssertionError("the trainer would have joined a collective without w2")
    assert engines[1].inspect().tainted is False
    wait_until(lambda: engines[0].inspect().tainted, 30.0, "w1 gave up at its deadline")
    assert len(world.control.history()) == 3


def test_of_vllm_servers(world: World) -> None:
    """init and update are collectives of two servers and one trainer; both workers live in one process."""
    servers = [VllmStandIn(Bugs()) for _ in range(2)]
    engines = [VllmEngine.connect(server.url, home=world.root / "home") for server in servers]
    try:
        world.fleet(*engines)
        first, second = world.meeting("init")[0], world.meeting("update")
        transfer = WeightTransferClient(world.control, version="step-7", timeout=30.0)
        ranks = {"w1": 1, "w2": 2}
        info = {"rendezvous": str(world.root / "init"), "tensors": [*TENSORS]}
        with transfer.init(per_worker={name: {**info, "rank_offset": rank} for name, rank in ranks.items()}):
            broadcast(first, 2)
        assert [(server.core.initialised or {})["rank_offset"] for server in servers] == [1, 2]
        transfer.start()
        with transfer.update({**second[1], "weights": "w7"}):
            broadcast(second[0], 2)
        transfer.finish()
        assert world.control.resume(expect=Expect(version="step-7")).ok
        assert [server.core.weights for server in servers] == ["w7", "w7"]
    finally:
        for host in world.hosts:
            host.stop()
        for server in servers:
            server.leave()


class Group:
    """What the example's trainer calls of a communicator."""

    def __init__(self, seen: list[str], size: int) -> None:
        self._seen = seen
        seen.append(f"joined {size}")

    def broadcast(self, tensor: str, src: int) -> None:
        self._seen.append(tensor)

    def abort(self) -> None:
        raise AssertionError("nothing went wrong")


def test_the_example_of_the_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2].joinpath("docs/engines/vllm.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0].replace("role=rollout", "all")
    servers = [VllmStandIn(Bugs()) for _ in range(2)]
    engines = [VllmEngine.connect(server.url, home=world.root / "home") for server in servers]
    joined: list[str] = []
    given = {
        "world_size": 4, "host": "trainer", "port": 1, "steps": 2, "model": None, "train": lambda model: None,
        "join_group": lambda **found: Group(joined, found["world_size"]),
        "names": ["w"], "dtypes": ["bf16"], "shapes": [[1]], "tensors": lambda model: ["w"],
    }  # fmt: skip
    try:
        world.fleet(*engines, names=("v1", "v2"))
        monkeypatch.setattr(ControlClient, "from_settings", lambda: world.control)
        exec(compile(example, "docs/engines/vllm.md", "exec"), given)
        assert joined == ["joined 9", "w", "w"]
        assert [server.core.version for server in servers] == ["step-1", "step-1"]
        offsets = [(server.core.initialised or {})["rank_offset"] for server in servers]
        assert offsets == [1, 5]
        assert [engine.inspect().paused for engine in engines] == [False, False]
    finally:
        for host in world.hosts:
            host.stop()
        for server in servers:
            server.leave()


@pytest.mark.parametrize("fail", ["one server", "trainer"])
def test_vllm_servers_of_a_broken_transfer_do_not_serve(world: World, fail: str) -> None:
    servers = [VllmStandIn(Bugs()) for _ in range(2)]
    engines = [VllmEngine.connect(server.url, home=world.root / "home") for server in servers]
    closed = threading.Event()
    try:
        world.fleet(*engines)
        info = {**world.meeting("update")[1], "seconds": 0.5}
        transfer = WeightTransferClient(
            world.control, version="v", timeout=30.0, grace=0.2, abort=lambda reason: closed.set()
        )
        transfer.start()
        if fail == "one server":
            servers[1].faults.answer["/update_weights"] = (500, b"{}")

        def joined() -> None:
            with transfer.update(info):
                if fail == "trainer":
                    raise ZeroDivisionError
                assert closed.wait(30.0)
                raise ConnectionError("the communicator was closed")

        with pytest.raises(TransferBroken if fail == "one server" else ZeroDivisionError):
            joined()
        wait_until(lambda: all(engine.inspect().tainted for engine in engines), 30.0, "both gave up")
        outcome = world.control.resume(check=False)
        assert {answer.code for answer in outcome.responses.values()} == {Code.TAINTED}
    finally:
        for host in world.hosts:
            host.stop()
        for server in servers:
            server.leave()
