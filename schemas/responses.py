"""ControlResponse: what a worker answers, and the codes (design section 3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated

from pydantic import Field, JsonValue, model_validator

from moebus.schemas.base import StrictModel
from moebus.schemas.control_args import RequestId
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.headers import HeaderList, build_headers
from moebus.schemas.jsonwire import decode_object, pack, unpack
from moebus.schemas.tags import Tag


class Code(str, Enum):
    """The result of a command at one worker; `http` is the number the gateway answers with."""

    OK = "ok"
    ALREADY = "already"
    PARTIAL = "partial"
    UNAUTHORIZED = "unauthorized"
    INVALID = "invalid"
    UNSUPPORTED = "unsupported"
    ILLEGAL_STATE = "illegal_state"
    CONFLICT = "conflict"
    EXPIRED = "expired"
    TIMEOUT = "timeout"
    FAILED = "failed"
    RANK_FAILED = "rank_failed"
    TAINTED = "tainted"
    BEHIND = "behind"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value

    @property
    def http(self) -> int:
        return HTTP_CODES[self]

    @property
    def good(self) -> bool:
        """Whether the worker is where the command wanted it."""
        return self in (Code.OK, Code.ALREADY)


HTTP_CODES: dict[Code, int] = {
    Code.OK: 200,
    Code.ALREADY: 200,
    Code.PARTIAL: 207,
    Code.UNAUTHORIZED: 403,
    Code.INVALID: 400,
    Code.UNSUPPORTED: 501,
    Code.ILLEGAL_STATE: 409,
    Code.CONFLICT: 409,
    Code.EXPIRED: 408,
    Code.TIMEOUT: 504,
    Code.FAILED: 500,
    Code.RANK_FAILED: 500,
    Code.TAINTED: 503,
    Code.BEHIND: 503,
    Code.UNKNOWN: 502,
}


class Phase(str, Enum):
    """How far an answer is. `expected` comes from the issuer and lists the workers that should answer."""

    EXPECTED = "expected"
    ACCEPTED = "accepted"
    PROGRESS = "progress"
    STAGED = "staged"
    DONE = "done"

    def __str__(self) -> str:
        return self.value


class Lifecycle(str, Enum):
    """What a worker's engine is doing (design section 3.4)."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    PAUSED = "PAUSED"
    UPDATING = "UPDATING"
    TAINTED = "TAINTED"
    BEHIND = "BEHIND"

    def __str__(self) -> str:
        return self.value


class Residency(str, Enum):
    """Where the memory of a tag is."""

    RESIDENT = "resident"
    ASLEEP = "asleep"

    def __str__(self) -> str:
        return self.value


class Weights(str, Enum):
    """Whether the weights hold values."""

    VALID = "valid"
    EMPTY = "empty"

    def __str__(self) -> str:
        return self.value


class WorkerState(StrictModel):
    """The state a worker reports. `version` None: unknown, or the weights hold nothing."""

    lifecycle: Lifecycle
    tags: dict[Tag, Residency]
    weights: Weights
    version: str | None = None
    run: str | None = None


class ControlResponse(StrictModel):
    """One answer. `worker_id` and `boot_id` are None in phase `expected` alone. `seq` counts the answers of one worker
    to one request from 0. Times are Unix seconds by the broker's clock."""

    request_id: RequestId
    request_digest: str
    request_offset: Annotated[int, Field(ge=0)]
    worker_id: str | None = None
    boot_id: str | None = None
    phase: Phase
    code: Code
    error_code: int
    message: str = ""
    result: dict[str, JsonValue] | None = None
    state: WorkerState | None = None
    seq: Annotated[int, Field(ge=0)] = 0
    started_at: float | None = None
    finished_at: float | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ControlResponse:
        if self.error_code != self.code.http and (self.code, self.error_code) != (Code.UNAUTHORIZED, 401):
            raise InvalidInput("error_code", f"{self.error_code} is not the number of {self.code}")
        if self.phase is not Phase.EXPECTED and (self.worker_id is None or self.boot_id is None):
            raise InvalidInput("worker_id", "only phase expected has no worker_id and boot_id")
        if self.phase is Phase.EXPECTED and not isinstance((self.result or {}).get("workers"), list):
            raise InvalidInput("result", "phase expected lists worker ids under result.workers")
        return self

    @property
    def expected_workers(self) -> tuple[str, ...]:
        """The ids in a record of phase `expected`."""
        listed = (self.result or {}).get("workers")
        return tuple(str(item) for item in listed) if isinstance(listed, list) else ()


def expected_response(request_id: str, digest: str, offset: int, workers: Sequence[str]) -> ControlResponse:
    """The record of phase `expected` that the issuer appends after the ack of its command."""
    return ControlResponse(
        request_id=request_id,
        request_digest=digest,
        request_offset=offset,
        phase=Phase.EXPECTED,
        code=Code.OK,
        error_code=Code.OK.http,
        result={"workers": list(workers)},
    )


def encode_response(
    response: ControlResponse, *, producer_id: str = "", traceparent: str | None = None
) -> tuple[bytes, HeaderList]:
    """Value and headers; the key is the request id in UTF-8. Raises InvalidInput, field `result`: too large."""
    value, encoding = pack(response.model_dump_json(exclude_none=True).encode(), "result")
    headers = build_headers(
        correlation_id=response.request_id,
        producer_id=producer_id or response.worker_id or "moebus",
        traceparent=traceparent,
        content_encoding=encoding,
    )
    return value, headers


def decode_response(value: bytes | None, headers: Iterable[tuple[str, bytes | None]] = ()) -> ControlResponse:
    """The answer in a record. Raises BadRecord (`null`, `bad_response`, ...); a missing code is never a success."""
    if value is None:
        raise BadRecord("null", "the record has no value")
    plain = unpack(value, headers)
    if decode_object(plain).faults:
        raise BadRecord("bad_response", "not a single well-formed JSON object")
    try:
        return ControlResponse.parse_json(plain)
    except InvalidInput as error:
        raise BadRecord("bad_response", str(error)) from None
