"""A worker that follows a script instead of driving an engine: what a controller's tests talk to."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from pydantic import JsonValue

from moebus.broker.ports import Broker, OutRecord, TopicPartition
from moebus.broker.topics import Topics
from moebus.schemas.control import ControlRequest, InvalidRequest, encode_request, make_request, parse_request
from moebus.schemas.control_args import DecideArgs, Method
from moebus.schemas.errors import BadRecord
from moebus.schemas.members import MemberState, encode_member
from moebus.schemas.responses import Code, ControlResponse, Phase, encode_response


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a script. `digest` None: that of the command."""

    phase: Phase = Phase.DONE
    code: Code = Code.OK
    message: str = ""
    result: dict[str, JsonValue] | None = None
    digest: str | None = None


OK = (Reply(Phase.ACCEPTED), Reply())
SILENT: tuple[Reply, ...] = ()


def staged(weights_digest: str | None = "d1") -> tuple[Reply, ...]:
    """The script of a worker that stages an update and then waits for the decision."""
    result: dict[str, JsonValue] = {"staged": "loaded"}
    if weights_digest is not None:
        result["weights_digest"] = weights_digest
    return (Reply(Phase.ACCEPTED), Reply(Phase.STAGED, result=result))


class FakeWorker:
    """Answers what its script says for a method, `OK` where it says nothing. A context manager."""

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        worker_id: str,
        labels: Mapping[str, str] | None = None,
        script: Mapping[Method, tuple[Reply, ...]] | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.seen: list[ControlRequest] = []
        self._topics = topics
        self._labels = dict(labels or {})
        self._script = {Method.UPDATE_WEIGHTS: staged(), **(script or {})}
        self._writer = broker.writer(worker_id)
        self._reader = broker.reader(worker_id)
        self._staged: dict[str, tuple[ControlRequest, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeWorker:
        hello = make_request(
            f"hello-{self.worker_id}", Method.HELLO, {"worker": self.worker_id, "boot": "b1", "engine": "e1"}
        )
        value, headers = encode_request(hello)
        record = OutRecord(self._topics.control_requests, value, hello.request_id.encode(), headers)
        since = self._writer.append(record).result(10).offset
        self._reader.assign({TopicPartition(self._topics.control_requests, 0): since})
        state = MemberState(
            kind="worker", member_id=self.worker_id, boot_id="b1", labels=self._labels, since=since, ready=True
        )
        value, headers = encode_member(state)
        self._writer.append(OutRecord(self._topics.members, value, self.worker_id.encode(), headers)).result(10)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)
        self._reader.close()
        self._writer.close(1)

    def _run(self) -> None:
        while not self._stop.is_set():
            for record in self._reader.poll(0.05):
                try:
                    request = parse_request(record.value, record.headers)
                except (BadRecord, InvalidRequest):
                    continue
                if request.where.matches(self.worker_id, self._labels):
                    self.seen.append(request)
                    self._obey(request, record.offset)

    def _obey(self, request: ControlRequest, offset: int) -> None:
        args = request.command
        if isinstance(args, DecideArgs):
            held = self._staged.pop(args.request_id, None)
            if held is not None:
                voided = args.decision == "void"
                self.answer(held[0], held[1], Reply(code=Code.FAILED, message="voided") if voided else Reply())
            return
        if request.method is Method.HELLO:
            return
        for reply in self._script.get(request.method, OK):
            if reply.phase is Phase.STAGED:
                self._staged[request.request_id] = (request, offset)
            self.answer(request, offset, reply)

    def answer(self, request: ControlRequest, offset: int, reply: Reply) -> None:
        """Appends one answer; also usable by a test that answers late."""
        response = ControlResponse(
            request_id=request.request_id,
            request_digest=reply.digest or request.digest,
            request_offset=offset,
            worker_id=self.worker_id,
            boot_id="b1",
            phase=reply.phase,
            code=reply.code,
            error_code=reply.code.http,
            message=reply.message,
            result=reply.result,
        )
        value, headers = encode_response(response)
        self._writer.append(OutRecord(self._topics.control_responses, value, request.request_id.encode(), headers))
