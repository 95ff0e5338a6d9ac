"""What the command log says, record by record, before any worker is asked: identities, runs, updates, decisions.

Pure: the same log gives the same index in every process.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import Enum

from moebus.broker.ports import LogRecord
from moebus.consumers.control.identity import Identities, Standing
from moebus.consumers.control.lifecycle import Command
from moebus.schemas.control import ControlRequest, InvalidRequest, parse_request
from moebus.schemas.control_args import (
    STATE_CHANGING,
    BeginRunArgs,
    DecideArgs,
    HelloArgs,
    Method,
    TransferWeightsArgs,
    UpdateWeightsArgs,
    Verdict,
)
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.headers import read_headers
from moebus.schemas.target import EVERYONE, Target


class Kind(Enum):
    """What has to be done about a record."""

    COMMAND = "command"
    DECIDE = "decide"
    HELLO = "hello"
    INVALID = "invalid"
    BAD = "bad"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of the log. `request` is None for INVALID, BAD and NULL; `error` is set for the first two.

    `verdict` and `update`: of a DECIDE that is the first for the request it names; `update` is that request's offset.
    """

    kind: Kind
    offset: int
    timestamp_ms: int
    request_id: str = ""
    digest: str = ""
    where: Target = EVERYONE
    standing: Standing = Standing.FIRST
    request: ControlRequest | None = None
    error: InvalidInput | BadRecord | None = None
    verdict: Verdict | None = None
    update: int | None = None
    method: str = ""
    traceparent: str | None = None

    @property
    def expires_ms(self) -> int | None:
        """Broker time in Unix ms after which the command has no effect; None without a deadline."""
        seconds = self.request.seconds if self.request is not None else float("inf")
        return None if seconds == float("inf") else self.timestamp_ms + int(seconds * 1000)

    def without_payload(self, now_ms: int) -> Entry:
        """The entry without the opaque part of a transfer that can no longer be executed."""
        request = self.request
        if request is None or request.method is not Method.TRANSFER_WEIGHTS or (self.expires_ms or 0) > now_ms:
            return self
        light = {name: value for name, value in (request.args or {}).items() if name != "info"}
        fields = request.wire() | {"args": light}
        return replace(self, request=ControlRequest.parse(fields))

    @property
    def command(self) -> Command:
        """The command, for `decide`. Only for COMMAND."""
        assert self.request is not None
        return Command(self.request.method, self.request.command, self.offset, self.expires_ms)


@dataclass(frozen=True, slots=True)
class Update:
    """An update or a finished transfer as the log has it. `args` None: a transfer, whose source is gone."""

    offset: int
    request_id: str
    digest: str
    where: Target
    version: str
    args: UpdateWeightsArgs | None
    expires_ms: int | None


@dataclass(frozen=True, slots=True)
class Verdicted:
    """The first decision for a request."""

    verdict: Verdict
    offset: int


class LogIndex:
    """Fed every record of the log once, in order, by one thread; read by any."""

    def __init__(self) -> None:
        self.identities = Identities()
        self.updates: dict[int, Update] = {}
        self.undecided: dict[int, Update] = {}
        self.decisions: dict[str, Verdicted] = {}
        self._runs: set[str] = set()
        self._changing: list[tuple[int, str, Target]] = []
        self._changing_offsets: list[int] = []

    def add(self, record: LogRecord) -> Entry:
        """The entry of the next record; never raises for what a record holds."""
        trace = read_headers(record.headers).traceparent
        try:
            request = parse_request(record.value, record.headers)
        except BadRecord as error:
            kind = Kind.NULL if error.reason == "null" else Kind.BAD
            return Entry(kind, record.offset, record.timestamp_ms, error=error)
        except InvalidRequest as error:
            return Entry(
                Kind.INVALID, record.offset, record.timestamp_ms, error.request_id, error.digest,
                error.target or EVERYONE, error=error.cause, method=error.method or "", traceparent=trace,
            )  # fmt: skip
        return self._place(request, record, trace)

    def changed_between(self, after: int, before: int) -> list[tuple[int, str, Target]]:
        """State-changing records with `after` < offset < `before`: (offset, request id, target)."""
        start = bisect_right(self._changing_offsets, after)
        stop = bisect_right(self._changing_offsets, before - 1)
        return self._changing[start:stop]

    def voided(self, request_id: str) -> bool:
        """Whether a command was given up by its issuer."""
        found = self.decisions.get(request_id)
        return found is not None and found.verdict == "void"

    def begun(self, run: str) -> bool:
        """Whether any record of the log began this run."""
        return run in self._runs

    def decidable(self, offset: int) -> bool:
        """Whether the record there is an update that is staged first."""
        update = self.updates.get(offset)
        return update is not None and update.args is not None

    def _place(self, request: ControlRequest, record: LogRecord, trace: str | None) -> Entry:
        standing = self.identities.standing(request.request_id, request.digest)
        error = self._fault(request) if standing is Standing.FIRST else None
        kind = {Method.HELLO: Kind.HELLO, Method.DECIDE: Kind.DECIDE}.get(request.method, Kind.COMMAND)
        verdict, update = None, None
        if error is None and standing is Standing.FIRST:
            self.identities.bind(request.request_id, request.digest, record.offset)
            verdict, update = self._learn(request, record)
        return Entry(
            Kind.INVALID if error is not None else kind, record.offset, record.timestamp_ms, request.request_id,
            request.digest, request.where, standing, request, error, verdict, update, str(request.method), trace,
        )  # fmt: skip

    def _fault(self, request: ControlRequest) -> InvalidInput | None:
        """What only the log can tell to be invalid."""
        if request.run is not None and not self.begun(request.run):
            return InvalidInput("run", f"{request.run!r} was never begun")
        args = request.command
        if not isinstance(args, DecideArgs):
            return None
        bound = self.identities.get(args.request_id)
        if bound is None:
            return InvalidInput("args.request_id", f"no command {args.request_id!r} before this record")
        if args.decision == "commit" and not self.decidable(bound.offset):
            return InvalidInput("args.decision", f"{args.request_id!r} is not an update; only void is possible")
        return None

    def _learn(self, request: ControlRequest, record: LogRecord) -> tuple[Verdict | None, int | None]:
        args = request.command
        if request.method in STATE_CHANGING:
            self._note_change(record.offset, request.request_id, request.where)
        if isinstance(args, BeginRunArgs):
            self._runs.add(args.run)
        elif isinstance(args, UpdateWeightsArgs):
            self._note_update(request, record, args.version, args)
        elif isinstance(args, TransferWeightsArgs) and args.step == "finish":
            self._note_update(request, record, args.version or "", None)
        elif isinstance(args, DecideArgs):
            return self._decision(args, record.offset)
        return None, None

    def _decision(self, args: DecideArgs, offset: int) -> tuple[Verdict | None, int | None]:
        if args.request_id in self.decisions:
            return None, None
        self.decisions[args.request_id] = Verdicted(args.decision, offset)
        bound = self.identities.get(args.request_id)
        update = self.updates.get(bound.offset) if bound is not None else None
        if bound is not None:
            self.undecided.pop(bound.offset, None)
        if update is not None and args.decision == "commit":
            self._note_change(offset, update.request_id, update.where)
        return args.decision, bound.offset if bound is not None else None

    def _note_change(self, offset: int, request_id: str, where: Target) -> None:
        self._changing.append((offset, request_id, where))
        self._changing_offsets.append(offset)

    def _note_update(
        self, request: ControlRequest, record: LogRecord, version: str, args: UpdateWeightsArgs | None
    ) -> None:
        expires = record.timestamp_ms + int(request.seconds * 1000)
        update = Update(record.offset, request.request_id, request.digest, request.where, version, args, expires)
        self.updates[record.offset] = update
        if args is not None:
            self.undecided[record.offset] = update


def hello_of(entry: Entry) -> HelloArgs | None:
    """The worker that a first-seen hello announces."""
    if entry.kind is not Kind.HELLO or entry.standing is not Standing.FIRST or entry.request is None:
        return None
    return entry.request.command if isinstance(entry.request.command, HelloArgs) else None
