"""Strict values: every model of a wire format derives from `StrictModel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from moebus.schemas.errors import InvalidInput

_MAX_ECHO = 80
M = TypeVar("M", bound="StrictModel")


class StrictModel(BaseModel):
    """Immutable, no coercion, unknown fields refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def parse(cls: type[M], value: object, *, at: str = "") -> M:
        """The model of a mapping that came from outside.

        `at`: name of the field that holds it, put before the field of an error.

        Raises:
            InvalidInput: naming the first field that is wrong.
        """
        if not isinstance(value, Mapping):
            raise InvalidInput(at or "value", f"an object is needed, not {json_type(value)}")
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            raise invalid_input(error, at) from None

    @classmethod
    def parse_json(cls: type[M], value: bytes, *, at: str = "") -> M:
        """The model of JSON text. Raises InvalidInput as `parse` does."""
        try:
            return cls.model_validate_json(value)
        except ValidationError as error:
            raise invalid_input(error, at) from None


def invalid_input(error: ValidationError, at: str = "") -> InvalidInput:
    """The first problem of `error` as one sentence that names its field."""
    first = error.errors(include_url=False)[0]
    path = _path(first["loc"], at)
    cause = first.get("ctx", {}).get("error")
    if first["type"] == "extra_forbidden":
        return InvalidInput(path, "unknown field")
    if first["type"] == "missing":
        return InvalidInput(path, "missing")
    if isinstance(cause, InvalidInput):
        return InvalidInput(_path((cause.field,), at) if not first["loc"] else path, cause.reason)
    if first["type"] in ("json_invalid", "value_error"):
        return InvalidInput(path, _lower(str(first["msg"]).removeprefix("Value error, ")))
    return InvalidInput(path, f"{_lower(str(first['msg']))}, not {echo(first.get('input'))}")


def json_type(value: object) -> str:
    """The name JSON has for the type of `value`, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, (list, tuple)):
        return "an array"
    return "an object" if isinstance(value, Mapping) else type(value).__name__


def echo(value: Any) -> str:
    """A short, printable rendering of a value from outside."""
    if isinstance(value, (Mapping, list, tuple)):
        return json_type(value)
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= _MAX_ECHO else text[: _MAX_ECHO - 3] + "..."


def _path(loc: tuple[int | str, ...], at: str) -> str:
    names = [at, *(str(part) for part in loc)]
    return ".".join(name for name in names if name) or "value"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
