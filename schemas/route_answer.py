"""What a store's HTTP answer says of the rows in its body, as header fields. Store and reader share it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args
from urllib.parse import quote, unquote

import numpy as np

from moebus.schemas.dtypes import wire_dtype
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import CheckLevel, Status, Versions
from moebus.schemas.route_ref import RouteRef

T = TypeVar("T")
_MAX_VERSIONS_CHARS = 16_384  # HTTP stacks refuse header fields of 64 KB and more


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """Rows [start, start + rows) of a whole attempt: ids [rows, layers, top_k], little-endian, C order.

    `ref.rows` counts all rows of the attempt. `layers`: global numbers, in the order of the body. No layers: an attempt
    without any row. `versions` is None where there are too many for a header. `partition`, `applied`: where it lies,
    and the next offset that the store has to read there. `checked`: how closely the store looked at these rows when it
    took them in. `checksum`: XXH3-64 of the rows, None where the first was sent before the last was read.
    """

    ref: RouteRef
    start: int
    rows: int
    layers: tuple[int, ...]
    top_k: int
    num_experts: int
    status: Status
    finish_reason: str = ""
    epoch: int = 0
    versions: Versions | None = ()
    card_digest: str | None = None
    partition: int = 0
    applied: int = 0
    checked: CheckLevel = "off"
    checksum: int | None = None

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of the ids in the body."""
        return wire_dtype(self.num_experts).newbyteorder("<") if self.num_experts else np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.rows, len(self.layers), self.top_k)

    @property
    def nbytes(self) -> int:
        """Size of the rows."""
        return self.rows * len(self.layers) * self.top_k * self.dtype.itemsize

    def to_headers(self) -> dict[str, str]:
        """All values are ASCII."""
        versions = json.dumps(self.versions) if self.versions is not None else ""
        fields = {
            "moebus-ref": json.dumps(self.ref.to_dict()), "moebus-start": str(self.start),
            "moebus-rows": str(self.rows),
            "moebus-layers": ",".join(map(str, self.layers)), "moebus-top-k": str(self.top_k),
            "moebus-num-experts": str(self.num_experts), "moebus-dtype": self.dtype.str, "moebus-status": self.status,
            "moebus-finish-reason": quote(self.finish_reason), "moebus-epoch": str(self.epoch),
            "moebus-versions": versions if len(versions) <= _MAX_VERSIONS_CHARS else "",
            "moebus-card-digest": self.card_digest or "", "moebus-partition": str(self.partition),
            "moebus-applied": str(self.applied), "moebus-checked": self.checked,
            "moebus-checksum": "" if self.checksum is None else f"{self.checksum:016x}",
        }  # fmt: skip
        return {name: value for name, value in fields.items() if value != ""}

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> RouteAnswer:
        """The inverse of `to_headers`; `headers` finds names in lower case.

        Raises:
            InvalidInput: naming the header field that is missing or malformed.
        """
        status = _text(headers, "moebus-status")
        if status not in get_args(Status):
            raise InvalidInput("moebus-status", f"{status!r} is unknown")
        layers = headers.get("moebus-layers", "")
        answer = cls(
            ref=RouteRef.from_dict(_json(headers, "moebus-ref", dict)),
            start=_number(headers, "moebus-start"),
            rows=_number(headers, "moebus-rows"),
            layers=tuple(_decimal("moebus-layers", text) for text in layers.split(",")) if layers else (),
            top_k=_number(headers, "moebus-top-k"),
            num_experts=_number(headers, "moebus-num-experts"),
            status=status,  # type: ignore[arg-type]  # checked above
            finish_reason=unquote(headers.get("moebus-finish-reason", "")),
            epoch=_number(headers, "moebus-epoch"),
            versions=_versions(headers),
            card_digest=headers.get("moebus-card-digest"),
            partition=_number(headers, "moebus-partition"),
            applied=_number(headers, "moebus-applied"),
            checked=_checked(headers),
            checksum=_checksum(headers),
        )
        if headers.get("moebus-dtype") != answer.dtype.str:
            wanted = answer.dtype.str
            raise InvalidInput("moebus-dtype", f"{headers.get('moebus-dtype')!r} where the experts need {wanted}")
        return answer


def _versions(headers: Mapping[str, str]) -> Versions | None:
    if "moebus-versions" not in headers:
        return None
    entries: list[Any] = _json(headers, "moebus-versions", list)
    try:
        return tuple((int(row), str(version)) for row, version in entries)
    except (TypeError, ValueError):
        raise InvalidInput("moebus-versions", "not a list of [row, version]") from None


def _json(headers: Mapping[str, str], name: str, kind: type[T]) -> T:
    try:
        value = json.loads(_text(headers, name))
    except ValueError:
        raise InvalidInput(name, "not JSON") from None
    if not isinstance(value, kind):
        raise InvalidInput(name, f"a JSON {kind.__name__} is needed")
    return value


def _text(headers: Mapping[str, str], name: str) -> str:
    if name not in headers:
        raise InvalidInput(name, "missing in the store's answer")
    return headers[name]


def _checked(headers: Mapping[str, str]) -> CheckLevel:
    """A level that this version does not know vouches for nothing."""
    text = headers.get("moebus-checked")
    return "ids" if text == "ids" else "full" if text == "full" else "off"


def _checksum(headers: Mapping[str, str]) -> int | None:
    name = "moebus-checksum"
    text = headers.get(name)
    if text is None:
        return None
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise InvalidInput(name, f"{text[:40]!r} is not 16 hexadecimal digits")
    return int(text, 16)


def _number(headers: Mapping[str, str], name: str) -> int:
    return _decimal(name, _text(headers, name))


def _decimal(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidInput(name, f"{text[:40]!r} is not a number")
    return int(text)
