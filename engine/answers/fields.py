"""Values of a JSON answer, each checked where it is read; an error names the path of the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moebus.schemas.base import echo, json_type
from moebus.schemas.errors import InvalidInput

Tokens = npt.NDArray[np.int64]
MAX_TOKENS = 2**31 - 1
"""Of one sequence: what a RouteRef can count."""


def parsed(answer: object) -> object:
    """The answer itself, or what its JSON text says.

    Raises:
        InvalidInput: field `response`, where the text is not JSON.
    """
    if not isinstance(answer, (str, bytes, bytearray)):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise InvalidInput("response", "not JSON") from None


def mapping(value: object, path: str) -> Mapping[str, object]:
    """Raises InvalidInput (field `path`) unless it is an object."""
    if not isinstance(value, Mapping):
        raise InvalidInput(path, f"an object is needed, not {json_type(value)}")
    return value


def member(parent: Mapping[str, object], name: str, path: str) -> Mapping[str, object]:
    """The object `name` of `parent`, empty where it is absent or null."""
    value = parent.get(name)
    return {} if value is None else mapping(value, join(path, name))


def items(value: object, path: str) -> Sequence[object]:
    """Raises InvalidInput (field `path`) unless it is an array."""
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(path, f"an array is needed, not {json_type(value)}")
    return value


def count(parent: Mapping[str, object], name: str, path: str) -> int | None:
    """A number of tokens; None where it is absent or null."""
    value = parent.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise InvalidInput(join(path, name), f"{echo(value)} is not an integer from 0 to {MAX_TOKENS}")
    return value


def text(parent: Mapping[str, object], name: str, path: str) -> str | None:
    """A string; None where it is absent or null."""
    value = parent.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(join(path, name), f"a string is needed, not {json_type(value)}")
    return value


def tokens(parent: Mapping[str, object], name: str, path: str) -> Tokens | None:
    """Token ids int64 [n]; None where they are absent or null."""
    value = parent.get(name)
    return None if value is None else token_array(value, join(path, name))


def token_array(value: object, path: str) -> Tokens:
    """Token ids int64 [n]. Raises InvalidInput (field `path`) unless they are integers of at least 0."""
    try:
        found = np.asarray(value) if isinstance(value, np.ndarray) else np.array(items(value, path))
    except (ValueError, OverflowError):
        raise InvalidInput(path, "token ids, integers in one row, are needed") from None
    if found.size == 0 and found.ndim == 1:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu" or int(found.min()) < 0 or int(found.max()) >= 2**63:
        raise InvalidInput(path, "token ids, integers of at least 0 in one row, are needed")
    return found.astype(np.int64)


def join(path: str, name: str) -> str:
    """`path.name`, `name` at the top."""
    return f"{path}.{name}" if path else name


def at(path: str, index: int) -> str:
    """`path[index]`."""
    return f"{path}[{index}]"
