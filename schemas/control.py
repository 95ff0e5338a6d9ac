"""ControlRequest: one command of the log (design sections 3.1 and 3.2)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, PrivateAttr, model_validator

from moebus.schemas.base import StrictModel
from moebus.schemas.control_args import (
    Method,
    MethodField,
    RequestId,
    Version,
    check_request_id,
    parse_args,
)
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.headers import HeaderList, build_headers
from moebus.schemas.jsonwire import Decoded, compact_json, decode_object, encode_json, pack, unpack
from moebus.schemas.target import Target, parse_target

DEFAULT_DEADLINE_S = 60.0
UPDATE_DEADLINE_S = 600.0
MAX_DEADLINE_S = 86_400.0
ENDLESS = frozenset({Method.HELLO, Method.BEGIN_RUN, Method.DECIDE})
_IDENTITY = ("method", "args", "target")


class InvalidRequest(InvalidInput):
    """A record whose id is readable and whose rest is not acceptable: it is answered `invalid` and binds no id.

    `target` is None where the target itself is wrong; `method` is the word as written, where it is a string.
    """

    def __init__(
        self, cause: InvalidInput, request_id: str, digest: str, method: str | None, target: Target | None
    ) -> None:
        super().__init__(cause.field, cause.reason)
        self.cause = cause
        self.request_id = request_id
        self.digest = digest
        self.method = method
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.cause, self.request_id, self.digest, self.method, self.target))


def _as_written(value: object) -> object:
    parse_target(value)
    return value


TargetField = Annotated[str | list[str] | None, BeforeValidator(_as_written)]


class Expect(StrictModel):
    """`after`: refused if a state-changing record for the worker lies behind this offset and before the command.
    `version`: refused if the worker's weights are of another version."""

    after: Annotated[int, Field(ge=-1)] | None = None
    version: Version | None = None


class ControlRequest(StrictModel):
    """A command. `args` and `target` keep the form they were written in; `command` and `where` are their values."""

    request_id: RequestId
    method: MethodField
    args: dict[str, JsonValue] | None = None
    target: TargetField = None
    deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False)] | None = None
    issuer: Annotated[str, Field(max_length=255)] | None = None
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    expect: Expect | None = None
    schema_version: Literal[1] = 1

    _command: StrictModel = PrivateAttr()
    _where: Target = PrivateAttr()
    _digest: str = PrivateAttr()

    @model_validator(mode="after")
    def _parse_parts(self) -> ControlRequest:
        self._where = parse_target(self.target)
        self._command = parse_args(self.method, self.args)
        written = [name for name in _IDENTITY if name in self.model_fields_set]
        self._digest = request_digest({name: getattr(self, name) for name in written})
        return self

    @property
    def command(self) -> StrictModel:
        """The arguments, as the model of this method."""
        return self._command

    @property
    def where(self) -> Target:
        """The parsed target."""
        return self._where

    @property
    def digest(self) -> str:
        """SHA-256 hex: with the id, the identity of the command."""
        return self._digest

    @property
    def seconds(self) -> float:
        """Seconds after the append time in which the command may run; `inf` where it has no deadline."""
        if self.method in ENDLESS:
            return math.inf
        if self.deadline_s is not None:
            return self.deadline_s
        return UPDATE_DEADLINE_S if self.method is Method.UPDATE_WEIGHTS else DEFAULT_DEADLINE_S

    def wire(self) -> dict[str, Any]:
        """The JSON object: the fields that were set, as written."""
        return self.model_dump(mode="json", exclude_unset=True)


def request_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 hex of the JSON list of those of method, args and target that `record` has, as written."""
    parts = [record[name] for name in _IDENTITY if name in record]
    return hashlib.sha256(compact_json(parts)).hexdigest()


def make_request(
    request_id: str, method: Method | str, args: StrictModel | Mapping[str, Any] | None = None, **fields: Any
) -> ControlRequest:
    """A request of this process; fields that are None are left out.

    Raises:
        InvalidInput: naming the field.
    """
    record: dict[str, Any] = {"request_id": request_id, "method": str(method)}
    if args is not None:
        record["args"] = _plain(args)
    record.update({name: value for name, value in fields.items() if value is not None})
    return ControlRequest.parse(record)


def parse_request(value: bytes | None, headers: Iterable[tuple[str, bytes | None]] = ()) -> ControlRequest:
    """The command in a record of the log. FastDeploy's bare `{request_id, method, args}` is one too.

    Raises:
        BadRecord: no id can be read: the record is dead-lettered, not answered. Reasons: `null` (only counted),
            `empty`, `too_large`, `bad_encoding`, `not_json`, `not_object`, `too_deep`, `no_request_id`.
        InvalidRequest: the id is known: the record is answered `invalid`, naming the field.
    """
    if value is None:
        raise BadRecord("null", "the record has no value")
    decoded = decode_object(unpack(value, headers))
    record = decoded.value
    request_id = _readable_id(decoded)
    try:
        if decoded.faults:
            raise InvalidInput(*decoded.faults[0])
        return ControlRequest.parse(record)
    except InvalidInput as error:
        word = record.get("method")
        method = word if isinstance(word, str) else None
        digest = request_digest(record)
        raise InvalidRequest(error, request_id, digest, method, _target_or_none(record)) from None


def encode_request(
    request: ControlRequest, *, producer_id: str = "", traceparent: str | None = None
) -> tuple[bytes, HeaderList]:
    """Value and headers of the record; the key is the request id in UTF-8. JSON above 64 KB is compressed.

    Raises:
        InvalidInput: field `args`; larger than a record may be. Nothing was sent.
    """
    value, encoding = pack(encode_json(request.wire()), "args")
    headers = build_headers(
        correlation_id=request.request_id,
        producer_id=producer_id or request.issuer or "moebus",
        traceparent=traceparent,
        content_encoding=encoding,
    )
    return value, headers


def _plain(args: StrictModel | Mapping[str, Any]) -> dict[str, Any]:
    return args.model_dump(mode="json", exclude_unset=True) if isinstance(args, StrictModel) else dict(args)


def _readable_id(decoded: Decoded) -> str:
    try:
        request_id = check_request_id(decoded.value.get("request_id"))
    except InvalidInput as error:
        raise BadRecord("no_request_id", str(error)) from None
    if any(name == "request_id" for name, _ in decoded.faults):
        raise BadRecord("no_request_id", "request_id appears twice")
    return request_id


def _target_or_none(record: Mapping[str, Any]) -> Target | None:
    try:
        return parse_target(record.get("target"))
    except InvalidInput:
        return None
