"""A control worker on the in-memory log, turned by hand: time stands still unless the test moves it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import Headers, LogRecord, OutRecord, TopicPartition
from moebus.broker.topics import Topics, ensure
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.port import Engine
from moebus.engine.simulated import SimulatedEngine
from moebus.observability.clock import ManualClock
from moebus.observability.health import Health
from moebus.observability.metrics import Metrics
from moebus.schemas.control import encode_request, make_request
from moebus.schemas.members import MemberState, decode_member
from moebus.schemas.responses import ControlResponse, Phase, decode_response
from tests.support.gate import Gate


class Crash(BaseException):
    """Ends a process in the middle, as kill -9 would."""


class CrashAt:
    """A `fault` that raises Crash the first time the point is reached after `skip` times."""

    def __init__(self, point: str, skip: int = 0) -> None:
        self.point = point
        self.skip = skip
        self.armed = False

    def __call__(self, name: str) -> None:
        if not self.armed or name != self.point:
            return
        if self.skip:
            self.skip -= 1
            return
        self.armed = False
        raise Crash(name)


def no_fault(name: str) -> None:
    """The fault that never happens."""


class Lab:
    """One fleet. `host` makes and opens a process; `ask` appends a command, turns the hosts and returns the answer."""

    def __init__(self, weights: Path | None = None) -> None:
        self.clock = ManualClock()
        self.broker = MemoryBroker(self.clock)
        self.topics = Topics("t")
        ensure(self.broker.admin(), self.topics)
        self.weights = weights
        self.hosts: list[ControlWorkerHost] = []
        self.metrics = Metrics()
        self.health = Health()
        self._writer = self.broker.writer("test")
        self._ids = itertools.count()
        self._boots = itertools.count()

    def engine(self, version: str = "initial", gate: Gate | None = None) -> SimulatedEngine:
        roots = [str(self.weights)] if self.weights is not None else []
        hook = {} if gate is None else {"hook": gate}
        return SimulatedEngine(version=version, allowed_roots=roots, clock=self.clock.monotonic, **hook)  # type: ignore[arg-type]

    def file(self, name: str, content: bytes = b"weights") -> str:
        """The path of a new weight file."""
        assert self.weights is not None
        path = self.weights / name
        path.write_bytes(content)
        return str(path)

    def host(
        self,
        *engines: Engine,
        ids: tuple[str, ...] = ("w1", "w2", "w3"),
        labels: Mapping[str, str] | None = None,
        fault: Any = no_fault,
        threads: bool = False,
        ready: bool = True,
    ) -> ControlWorkerHost:
        """A process with one worker per engine: open and ready, or with `threads` not started yet."""
        specs = [
            WorkerSpec(name, engine, dict(labels or {}), trouble=lambda engine=engine: getattr(engine, "trouble", None))  # type: ignore[misc]
            for name, engine in zip(ids, engines, strict=False)
        ]
        host = ControlWorkerHost(
            self.broker, self.topics, specs, clock=self.clock, metrics=self.metrics, health=self.health, fault=fault,
            threads=threads, rng=random.Random(next(self._boots)), grace=1.0,
        )  # fmt: skip
        if threads:
            return host
        host.open()
        self.hosts.append(host)
        if ready:
            self.turn()
        return host

    def turn(self, times: int = 3) -> None:
        """Lets every process read and work."""
        for _ in range(times):
            for host in list(self.hosts):
                host.step()

    def crash(self, host: ControlWorkerHost) -> None:
        """The process is gone, without a word."""
        self.hosts.remove(host)

    def silence(self) -> None:
        """Long enough for a successor to take over."""
        self.clock.advance(10.0)

    # -- the log

    def send(self, method: str, args: Mapping[str, Any] | None = None, *, id: str | None = None, **fields: Any) -> str:
        """Appends a command; returns its id."""
        request = make_request(id or f"r{next(self._ids)}", method, args, **fields)
        value, headers = encode_request(request, producer_id="test")
        self.send_raw(value, headers, request.request_id.encode())
        return request.request_id

    def send_raw(self, value: bytes | None, headers: Headers = (), key: bytes | None = None) -> int:
        """Appends any record to the command log; returns its offset."""
        record = OutRecord(self.topics.control_requests, value, key, headers)
        return self._writer.append(record).result(5).offset

    def ask(self, method: str, args: Mapping[str, Any] | None = None, **fields: Any) -> ControlResponse:
        """Appends a command, turns, and returns the last answer of the first worker that has one."""
        request_id = self.send(method, args, **fields)
        self.turn()
        return self.answer(request_id)

    def decide(self, request_id: str, decision: str = "commit") -> None:
        self.send("decide", {"request_id": request_id, "decision": decision})
        self.turn()

    def records(self, topic: str) -> list[LogRecord]:
        """All of a topic."""
        reader = self.broker.reader("look")
        tp = TopicPartition(topic, 0)
        reader.assign({tp: 0})
        found: list[LogRecord] = []
        while batch := reader.poll(0.0, 10_000):
            found.extend(batch)
        reader.close()
        return found

    def answers(
        self, request_id: str, *, worker: str | None = None, phase: Phase | None = Phase.DONE
    ) -> list[ControlResponse]:
        """The answers to a request in log order."""
        found = [decode_response(r.value, r.headers) for r in self.records(self.topics.control_responses)]
        return [
            one for one in found
            if one.request_id == request_id and worker in (None, one.worker_id) and phase in (None, one.phase)
        ]  # fmt: skip

    def answer(self, request_id: str, worker: str | None = None) -> ControlResponse:
        """The only final answer, else the last staged one."""
        done = self.answers(request_id, worker=worker)
        staged = self.answers(request_id, worker=worker, phase=Phase.STAGED)
        assert done or staged, f"no answer to {request_id}"
        return (done or staged)[-1]

    def member(self, worker: str = "w1") -> MemberState | None:
        """The last state of a worker; None after its tombstone."""
        last = [r for r in self.records(self.topics.members) if r.key == worker.encode()][-1]
        return None if last.value is None else decode_member(last.value, last.headers)

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self.broker.close()
