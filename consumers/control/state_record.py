"""`State` as a worker records it in its MemberState, for its own restart."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum

from pydantic import JsonValue

from moebus.consumers.control.lifecycle import State
from moebus.schemas.responses import Lifecycle, Residency, Weights

_ENUMS: dict[str, type[Enum]] = {
    "phase": Lifecycle, "fault": Lifecycle, "weight": Residency, "kv_cache": Residency, "weights": Weights,
}  # fmt: skip
_OFFSETS = ("version_offset", "pending", "missed")
_TEXTS = ("version", "run", "holds", "reason")
_FLAGS = ("transferring",)
_DEFAULT = State()


def to_record(state: State) -> dict[str, JsonValue]:
    """The fields that differ from their defaults. Frozen requests are not recorded: the engine knows."""
    record: dict[str, JsonValue] = {}
    for name in (field.name for field in fields(State) if field.name != "frozen"):
        value = getattr(state, name)
        if value != getattr(_DEFAULT, name):
            record[name] = str(value) if name in _ENUMS and value is not None else value
    if state.reason is not None:
        record["reason"] = state.reason[:120]
    return record


def from_record(record: dict[str, JsonValue]) -> State:
    """The state of a record of this or another version: what is unknown or of a wrong type is left at its default."""
    known = {name: _value(name, value) for name, value in record.items()}
    return State(**{name: value for name, value in known.items() if value is not None})  # type: ignore[arg-type]


def _value(name: str, value: JsonValue) -> object:
    if name in _ENUMS:
        return next((item for item in _ENUMS[name] if item.value == value), None)
    if name in _OFFSETS:
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if name in _TEXTS:
        return value if isinstance(value, str) else None
    return value if name in _FLAGS and isinstance(value, bool) else None
