"""Every interleaving of one update of weights: the log, workers, controllers, and the passing of its deadline.

Nothing of the decision is written again here. A worker is the real `Worker` (decide, effects, reconcile, take-over)
beside a simulated engine; a controller is the real `Answers` and `choose`. What the model steps is who moves next.

A worker depends only on what it has gone through, so each history is played once and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import LogRecord, OutRecord, Position
from moebus.broker.topics import Topics
from moebus.consumers.control.broker_time import BrokerClock
from moebus.consumers.control.journal import Journal
from moebus.consumers.control.log_index import Entry, LogIndex
from moebus.consumers.control.recovery import take_over
from moebus.consumers.control.reporter import WorkerSpec
from moebus.consumers.control.worker import Shared, Worker
from moebus.engine.simulated import SimulatedEngine
from moebus.observability.clock import ManualClock
from moebus.observability.metrics import Metrics
from moebus.producers.control.answers import Answers
from moebus.producers.control.update import Choice, choose
from moebus.schemas.control import encode_request, make_request, parse_request
from moebus.schemas.control_args import Verdict
from moebus.schemas.members import MemberState, decode_member
from moebus.schemas.responses import ControlResponse, Phase, decode_response

UPDATE = "update"
WORKERS = ("w1", "w2")
DEADLINE_S = 100.0
AFTER_VOTE = 2
"""Records that a worker has read once it has staged: the pause and the update."""
TOPICS = Topics("t")
START_MS = ManualClock().now_ms()
_BROKER, _METRICS = MemoryBroker(), Metrics()
Plan = Callable[[SimulatedEngine], None]
"""Plants failures in the engine of `w2`."""


@cache
def record(name: str, offset: int) -> LogRecord:
    """The record called `name`: pause, update, resume-N, commit-BY or void-BY."""
    kind, _, by = name.partition("-")
    if kind in ("commit", "void"):
        request = make_request(name, "decide", {"request_id": UPDATE, "decision": kind}, issuer=by)
    elif kind == UPDATE:
        request = make_request(UPDATE, "update_weights", {"version": "v2"}, deadline_s=DEADLINE_S)
    else:
        request = make_request(name, kind, deadline_s=10_000)
    value, headers = encode_request(request)
    return LogRecord(TOPICS.control_requests, 0, offset, START_MS, name.encode(), value, tuple(headers))


class _Writer:
    """Takes what a worker appends; every ack comes at once."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.answers: list[ControlResponse] = []
        self._member: OutRecord | None = None

    @property
    def member(self) -> MemberState | None:
        """The last state that the worker recorded."""
        return None if self._member is None else decode_member(self._member.value or b"", self._member.headers)

    def append(self, out: OutRecord) -> Future[Position]:
        if out.topic == TOPICS.control_responses:
            if out.key == UPDATE.encode():
                self.answers.append(decode_response(out.value, out.headers))
        elif out.topic == TOPICS.members and out.value is not None and out.key is not None and b"/" not in out.key:
            self._member = out
        receipt: Future[Position] = Future()
        receipt.set_result(Position(out.topic, 0, 0, self._clock.now_ms()))
        return receipt

    def unsettled(self) -> int:
        return 0

    def flush(self, timeout: float) -> bool:
        return True

    def close(self, timeout: float) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What one history made of a worker. `answers`: to the update, in order. `binding`: what its state still waits
    for. `owes_void`: its deadline has passed without a decision."""

    answers: tuple[ControlResponse, ...]
    healthy: bool
    version: str | None
    serving: bool
    binding: bool
    owes_void: bool
    lifecycle: str


class Played:
    """A worker that goes through one history: `(record name, late)` for each record it reads, `("restart", late)`."""

    def __init__(self, worker_id: str, plan: Plan | None) -> None:
        self.clock = ManualClock(START_MS)
        self.engine = SimulatedEngine(clock=self.clock.monotonic)
        if plan is not None:
            plan(self.engine)
        self._id = worker_id
        self._writer = _Writer(self.clock)
        self._boots = 0
        self._entries: list[Entry] = []
        self._index = LogIndex()
        self.worker = self._boot()
        take_over(self.worker, None, (), 0)

    def _boot(self) -> Worker:
        self._boots += 1
        time, stop = BrokerClock(self.clock), threading.Event()
        journal = Journal(self._writer, TOPICS, time, self._id, stop)
        shared = Shared(_BROKER, TOPICS, journal, self._index, time, _METRICS, lambda name: None)
        return Worker(WorkerSpec(self._id, self.engine), f"b{self._boots}", shared)

    def go(self, event: str, late: bool) -> None:
        if late and self.clock.monotonic() < 2 * DEADLINE_S:
            self.clock.advance(2 * DEADLINE_S)
        if event == "restart":
            self.worker = self._boot()
            take_over(self.worker, self._writer.member, tuple(self._entries), len(self._entries))
            return
        entry = self._index.add(record(event, len(self._entries)))
        self._entries.append(entry)
        if self.worker.concerns(entry):
            self.worker.handle(entry)

    def seen(self, late: bool) -> Seen:
        now = START_MS + int(2000 * DEADLINE_S) if late else self.clock.now_ms()
        state, found = self.worker.state, self.engine.inspect()
        return Seen(
            answers=tuple(self._writer.answers),
            healthy=state.fault is None,
            version=found.version,
            serving=not found.paused,
            binding=state.pending is not None,
            owes_void=self.worker.void_due(now, 0) is not None,
            lifecycle=str(state.lifecycle),
        )


History = tuple[tuple[str, bool], ...]


class Side(NamedTuple):
    """A worker. `at`: number of its history in `Model.histories`; `read`: how many records of the log it has read."""

    at: int = 0
    read: int = 0
    restarted: bool = False
    voided: bool = False


class World(NamedTuple):
    """`log`: names of records. Answers are a matter of the workers' histories alone. `minds`: what each controller has
    made up its mind to write; `wrote`: which have. `late`: the update's deadline has passed."""

    log: tuple[str, ...]
    sides: tuple[Side, ...]
    minds: tuple[Verdict | None, ...]
    wrote: tuple[bool, ...]
    late: bool = False
    resumes: int = 0


@dataclass
class Model:
    """`controllers`: how many may decide. `resumes`: how many times somebody asks to open traffic, at any time.
    `restarts`: w2's process may be replaced after its vote. `deaf`: a kind of record that
    w2 never sees, to see the check fail."""

    plan: Plan | None = None
    controllers: int = 2
    resumes: int = 0
    restarts: bool = False
    deaf: str | None = None
    histories: list[History] = field(default_factory=lambda: [()])
    _after: dict[tuple[int, str, bool], int] = field(default_factory=dict)
    _kept: dict[tuple[int, int, bool], Seen] = field(default_factory=dict)
    _live: dict[int, tuple[History, Played]] = field(default_factory=dict)
    _chosen: dict[tuple[int, int, bool], Choice | None] = field(default_factory=dict)

    @cached_property
    def first(self) -> World:
        nobody = (None,) * self.controllers
        return World(("pause", UPDATE), (Side(),) * len(WORKERS), nobody, (False,) * self.controllers)

    def seen(self, world: World, number: int) -> Seen:
        key = (number, world.sides[number].at, world.late)
        if key not in self._kept:
            self._kept[key] = self._play(number, self.histories[key[1]]).seen(world.late)
        return self._kept[key]

    def _then(self, at: int, event: str, late: bool) -> int:
        """The number of a history that goes on with `event`."""
        key = (at, event, late)
        if key not in self._after:
            self._after[key] = len(self.histories)
            self.histories.append((*self.histories[at], (event, late)))
        return self._after[key]

    def _play(self, number: int, history: History) -> Played:
        """The worker at the end of the history; one that has gone the beginning of it goes on."""
        last, played = self._live.get(number, ((), None))
        if played is None or history[: len(last)] != last:
            last, played = (), Played(WORKERS[number], self.plan if number else None)
        for event, late in history[len(last) :]:
            played.go("status" if number and event.partition("-")[0] == self.deaf else event, late)
        self._live[number] = (history, played)
        return played

    def answers(self, world: World) -> Answers:
        """What a controller knows that has read every answer and no decision: the least a late one can know."""
        request = parse_request(record(UPDATE, 1).value)
        answers = Answers(request, Position(TOPICS.control_requests, 0, 1, START_MS), WORKERS)
        for number in range(len(WORKERS)):
            for place, answer in enumerate(self.seen(world, number).answers):
                answers.add(answer, (number, place))
        return answers

    def after(self, world: World) -> Iterator[World]:
        """Every world that may come next."""
        if not world.late:
            yield world._replace(late=True)
        for number, side in enumerate(world.sides):
            yield from self._worker(world, number, side)
        for number in range(self.controllers):
            yield from self._controller(world, number)
        if world.resumes < self.resumes and not (self.restarts and world.late):
            name = f"resume-{world.resumes}"
            yield world._replace(log=(*world.log, name), resumes=world.resumes + 1)

    def _worker(self, world: World, number: int, side: Side) -> Iterator[World]:
        if side.read < len(world.log):
            at = self._then(side.at, world.log[side.read], world.late)
            yield _with(world, number, side._replace(at=at, read=side.read + 1))
        if self.seen(world, number).owes_void and not side.voided:
            name = f"void-{WORKERS[number]}"
            yield _with(world, number, side._replace(voided=True))._replace(log=(*world.log, name))
        if self.restarts and not world.late and number == 1 and not side.restarted and side.read == AFTER_VOTE:
            at = self._then(side.at, "restart", world.late)
            yield _with(world, number, side._replace(at=at, restarted=True))

    def _controller(self, world: World, number: int) -> Iterator[World]:
        """Reads what is there and makes up its mind; writes it any time later, or never: it may be dead."""
        if world.wrote[number]:
            return
        mind = world.minds[number]
        if mind is not None:
            wrote = tuple(done or at == number for at, done in enumerate(world.wrote))
            yield world._replace(log=(*world.log, f"{mind}-c{number}"), wrote=wrote)
            return
        key = (world.sides[0].at, world.sides[1].at, world.late)
        if key not in self._chosen:
            self._chosen[key] = choose(self.answers(world), world.late)
        choice = self._chosen[key]
        options: set[Verdict] = {choice.verdict} if choice is not None else set()
        if world.late:
            options.add("void")  # gives up, whatever it knows
        for verdict in sorted(options):
            minds = tuple(verdict if at == number else one for at, one in enumerate(world.minds))
            yield world._replace(minds=minds)

    def quiet(self, world: World) -> bool:
        """Whether only controllers, who may all be dead, could still move."""
        sides = enumerate(world.sides)
        return world.late and all(
            side.read == len(world.log) and (side.voided or not self.seen(world, at).owes_void) for at, side in sides
        )

    def worlds(self) -> Iterator[World]:
        """Every world that can be reached, each once."""
        known, waiting = {self.first}, [self.first]
        while waiting:
            world = waiting.pop()
            yield world
            for following in self.after(world):
                if following not in known:
                    known.add(following)
                    waiting.append(following)

    def check(self, world: World) -> None:
        """What holds in every world, and what holds once everybody has read everything. Raises AssertionError."""
        seen = [self.seen(world, number) for number in range(len(WORKERS))]
        serving = {one.version for one in seen if one.serving}
        assert len(serving) <= 1, f"two versions serve: {serving} {world}"
        for one in seen:
            finals = [answer for answer in one.answers if answer.phase is Phase.DONE]
            assert len(finals) <= 1, f"two final answers: {finals} {world}"
            assert one.healthy or not one.serving, world
        if self.quiet(world):
            healthy = {one.version for one in seen if one.healthy}
            assert len(healthy) <= 1, f"two versions stay: {healthy} {world}"
            assert not any(one.binding for one in seen), f"somebody waits for ever: {world}"
            assert all(any(a.phase is Phase.DONE for a in one.answers) for one in seen), f"no final answer: {world}"


def _with(world: World, number: int, side: Side) -> World:
    return world._replace(sides=tuple(side if at == number else one for at, one in enumerate(world.sides)))
