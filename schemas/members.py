"""MemberState: what workers and stores say of themselves in the members topic (design section 3.1).

Keys: the member id holds its MemberState, `id/ops` its last operations. A null value (tombstone) under the id means
that the member left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

from pydantic import Field, JsonValue, StringConstraints

from moebus.schemas.base import StrictModel
from moebus.schemas.control_args import WorkerId
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.headers import HeaderList, build_headers
from moebus.schemas.jsonwire import decode_object, unpack
from moebus.schemas.responses import Code, WorkerState
from moebus.schemas.tags import Tag

MAX_MEMBER_BYTES = 2048
HEARTBEAT_S = 2.0
LIVE_S = 10.0
MAX_OPS = 8
_OPS_SUFFIX = "/ops"
M = TypeVar("M", bound=StrictModel)
Text = Annotated[str, StringConstraints(max_length=64)]


class Operation(StrictModel):
    """The operation in progress. `request_id` is cut to 64 characters; the offset names it fully."""

    offset: Annotated[int, Field(ge=0)]
    method: str
    request_id: Text
    step: Text = ""
    started_ms: int


class MemberState(StrictModel):
    """State of one member.

    `since`: first offset of the command log it answers for; `applied`: next offset to deal with. `busy_until`: broker
    time in Unix ms to which an operation may keep it silent. `desired`: the worker's own record of the state that
    commands ask of it, for its restart. `partitions` and `offsets` are of stores.
    """

    kind: Literal["worker", "store"]
    member_id: WorkerId
    boot_id: Text
    engine_id: Annotated[str, StringConstraints(max_length=128)] | None = None
    engine_kind: Text | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    run: Text | None = None
    state: WorkerState | None = None
    bytes: dict[Tag, int] = Field(default_factory=dict)
    weights_digest: Text | None = None
    since: int | None = None
    applied: int | None = None
    operation: Operation | None = None
    busy_until: int | None = None
    ready: bool = False
    reason: Annotated[str, StringConstraints(max_length=200)] | None = None
    desired: dict[str, JsonValue] | None = None
    http: Annotated[str, StringConstraints(max_length=128)] | None = None
    url: Annotated[str, StringConstraints(max_length=128)] | None = None
    partitions: list[int] | None = None
    offsets: dict[str, int] | None = None
    schema_version: Literal[1] = 1

    def live(self, last_append_ms: int, now_ms: int) -> bool:
        """Whether the member counts as alive at broker time `now_ms`; `last_append_ms` is of its last record."""
        return now_ms - last_append_ms < LIVE_S * 1000 or (self.busy_until is not None and self.busy_until > now_ms)


class DoneOperation(StrictModel):
    """A finished operation, for people to look at."""

    offset: int
    method: str
    request_id: Text
    code: Code
    finished_ms: int


class MemberOps(StrictModel):
    """Last operations of a worker, newest last."""

    member_id: WorkerId
    ops: list[DoneOperation]


def ops_key(member_id: str) -> bytes:
    """Key of the record of last operations."""
    return (member_id + _OPS_SUFFIX).encode()


def split_key(key: bytes | None) -> tuple[str, bool] | None:
    """(member id, whether it is the ops record) of a key; None where it is not one of ours."""
    if key is None:
        return None
    try:
        text = key.decode("ascii")
    except UnicodeDecodeError:
        return None
    return (text[: -len(_OPS_SUFFIX)], True) if text.endswith(_OPS_SUFFIX) else (text, False)


def encode_member(state: MemberState) -> tuple[bytes, HeaderList]:
    """Value and headers. Above 2 KB the reasons are left out. Raises InvalidInput, field `member`: still too large."""
    value = state.model_dump_json(exclude_none=True).encode()
    if len(value) > MAX_MEMBER_BYTES:
        desired = {name: item for name, item in (state.desired or {}).items() if name != "reason"}
        short = state.model_copy(update={"reason": None, "desired": desired or None})
        value = short.model_dump_json(exclude_none=True).encode()
    return _bounded(value, state.member_id)


def encode_ops(ops: MemberOps) -> tuple[bytes, HeaderList]:
    """Value and headers of the ops record; the oldest are dropped to stay within 2 KB."""
    kept = ops.ops[-MAX_OPS:]
    value = ops.model_copy(update={"ops": kept}).model_dump_json().encode()
    while len(value) > MAX_MEMBER_BYTES and kept:
        kept = kept[1:]
        value = ops.model_copy(update={"ops": kept}).model_dump_json().encode()
    return _bounded(value, ops.member_id)


def decode_member(value: bytes, headers: Iterable[tuple[str, bytes | None]] = ()) -> MemberState:
    """The state in a record. Raises BadRecord (`bad_member` and those of `unpack`)."""
    return _decode(MemberState, value, headers)


def decode_ops(value: bytes, headers: Iterable[tuple[str, bytes | None]] = ()) -> MemberOps:
    """The last operations in a record. Raises BadRecord."""
    return _decode(MemberOps, value, headers)


def _decode(model: type[M], value: bytes, headers: Iterable[tuple[str, bytes | None]]) -> M:
    plain = unpack(value, headers)
    decode_object(plain)
    try:
        return model.parse_json(plain)
    except InvalidInput as error:
        raise BadRecord("bad_member", str(error)) from None


def _bounded(value: bytes, member_id: str) -> tuple[bytes, HeaderList]:
    if len(value) > MAX_MEMBER_BYTES:
        reason = f"{len(value)} bytes for {member_id}, at most {MAX_MEMBER_BYTES}: shorten labels or addresses"
        raise InvalidInput("member", reason)
    return value, build_headers(correlation_id=member_id, producer_id=member_id)
