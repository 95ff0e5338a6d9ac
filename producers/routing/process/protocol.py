"""What the child tells its publisher: one JSON object a line."""

from __future__ import annotations

import json
from typing import Any

from moebus.broker.errors import AppendFailed, AppendUnknown, TopicMissing
from moebus.broker.ports import Position
from moebus.producers.routing.errors import RoutesDropped
from moebus.producers.routing.parcel import Sent
from moebus.schemas.errors import InvalidInput

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (AppendFailed, AppendUnknown, TopicMissing, RoutesDropped)
}
BEAT = b"{}\n"


def told(seq: int, outcome: Sent | Exception) -> bytes:
    """The line that says how entry `seq` ended."""
    if isinstance(outcome, Sent):
        places = [(p.topic, p.partition, p.offset, p.timestamp_ms) for p in outcome.positions]
        fields: dict[str, Any] = {"at": places, "kinds": outcome.kinds, "bytes": outcome.wire_bytes}
    elif isinstance(outcome, InvalidInput):
        fields = {"error": "InvalidInput", "field": outcome.field, "text": outcome.reason}
    else:
        fields = {"error": type(outcome).__name__, "text": str(outcome)}
    return json.dumps({"seq": seq, **fields}, separators=(",", ":")).encode() + b"\n"


def heard(line: bytes) -> tuple[int, Sent | Exception] | None:
    """The inverse; None for a sign of life."""
    fields = json.loads(line)
    if "seq" not in fields:
        return None
    if "error" not in fields:
        places = tuple(Position(*place) for place in fields["at"])
        return fields["seq"], Sent(places, fields["kinds"], fields["bytes"])
    if fields["error"] == "InvalidInput":
        return fields["seq"], InvalidInput(fields["field"], fields["text"])
    return fields["seq"], _ERRORS.get(fields["error"], AppendFailed)(fields["text"])
