"""RouteRef: the small value that travels with a sample through a replay buffer and finds its routes again."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from moebus.schemas.attempt import check_attempt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.rollout import RolloutKey, check_choice, check_group, check_rollout_id, check_run, default_group

MAX_TEXT_BYTES = 1023
MAX_ROWS = 2**31 - 1
_HASH = re.compile(r"[0-9a-f]{32}")
_PLAIN = ("run", "choice", "attempt", "rows", "token_hash", "prompt_rows", "prompt_hash")
_FIELDS = frozenset([*_PLAIN, "id", "id64", "group", "group64"])


def token_hash(token_ids: npt.ArrayLike) -> str:
    """XXH3-128 (32 hex digits) over token ids [n] as little-endian int64.

    Raises:
        InvalidInput: field `token_ids`; not one-dimensional or not integers.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidInput("token_ids", f"integers [n] are needed, not {ids.dtype} {list(ids.shape)}")
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(ids, dtype="<i8").tobytes())


def check_hash(value: str, field: str) -> str:
    """`value` itself. Raises InvalidInput unless it is 32 lower-case hex digits."""
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise InvalidInput(field, f"{str(value)[:40]!r} is not 32 hex digits")
    return value


@dataclass(frozen=True, slots=True)
class RouteRef:
    """Names one attempt of one rollout.

    `group` is None where it is the default of the id. `attempt`: ULID text. `rows`: rows of the attempt, base
    included. `token_hash`: over the token ids of those rows; `prompt_rows`, `prompt_hash`: the same for the prompt.
    """

    run: str
    rollout_id: str
    choice: int
    attempt: str
    rows: int
    group: str | None = None
    token_hash: str | None = None
    prompt_rows: int | None = None
    prompt_hash: str | None = None

    def __post_init__(self) -> None:
        check_run(self.run)
        check_rollout_id(self.rollout_id)
        check_choice(self.choice)
        check_attempt(self.attempt)
        _rows("rows", self.rows)
        if self.group is not None:
            check_group(self.group)
            if self.group == default_group(self.rollout_id):
                object.__setattr__(self, "group", None)
        if self.prompt_rows is not None:
            _rows("prompt_rows", self.prompt_rows)
        for field, value in (("token_hash", self.token_hash), ("prompt_hash", self.prompt_hash)):
            if value is not None:
                check_hash(value, field)

    @property
    def key(self) -> RolloutKey:
        return RolloutKey(self.run, self.rollout_id, self.choice)

    @property
    def effective_group(self) -> str:
        """The group that chose the partition."""
        return self.group if self.group is not None else default_group(self.rollout_id)

    def to_dict(self) -> dict[str, str | int]:
        """The fields that are set; an id or group that JSON would have to escape goes as base64 (`id64`, `group64`)."""
        group = _text("group", self.group) if self.group is not None else {}
        fields = {
            "run": self.run, **_text("id", self.rollout_id), "choice": self.choice, **group,
            "attempt": self.attempt, "rows": self.rows, "token_hash": self.token_hash,
            "prompt_rows": self.prompt_rows, "prompt_hash": self.prompt_hash,
        }  # fmt: skip
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> RouteRef:
        """The inverse of `to_dict`.

        Raises:
            InvalidInput: naming the field that is unknown, missing or malformed.
        """
        if not isinstance(data, Mapping):
            raise InvalidInput("ref", f"an object is needed, not {type(data).__name__}")
        for name in data:
            if name not in _FIELDS:
                raise InvalidInput(str(name), "unknown field of a RouteRef")
        for name in ("run", "choice", "attempt", "rows"):
            if name not in data:
                raise InvalidInput(name, "missing in the RouteRef")
        rollout_id = _read_text(data, "id")
        if rollout_id is None:
            raise InvalidInput("id", "missing in the RouteRef")
        rest = {name: data.get(name) for name in _PLAIN}
        return cls(rollout_id=rollout_id, group=_read_text(data, "group"), **rest)  # type: ignore[arg-type]  # checked

    def __str__(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))

    def to_json(self) -> str:
        """One line of JSON, below 1 KB of UTF-8; the same as `str`."""
        return str(self)

    @classmethod
    def parse(cls, text: str | bytes) -> RouteRef:
        """Reads what `str` or `to_json` wrote.

        Raises:
            InvalidInput: not JSON, too long, or as `from_dict`.
        """
        if len(text) > MAX_TEXT_BYTES:
            raise InvalidInput("ref", f"{len(text)} bytes; a RouteRef has at most {MAX_TEXT_BYTES}")
        try:
            data = json.loads(text)
        except ValueError:
            raise InvalidInput("ref", "not JSON") from None
        return cls.from_dict(data)


def _rows(field: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_ROWS:
        raise InvalidInput(field, f"{value!r} is not an integer from 0 to {MAX_ROWS}")


def _text(name: str, value: str) -> dict[str, str]:
    if len(json.dumps(value, ensure_ascii=False)) == len(value) + 2:
        return {name: value}
    return {name + "64": base64.urlsafe_b64encode(value.encode()).decode()}


def _read_text(data: Mapping[str, object], name: str) -> str | None:
    if name + "64" not in data:
        value = data.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidInput(name, f"a string is needed, not {type(value).__name__}")
        return value
    if name in data:
        raise InvalidInput(name, f"given twice, as {name} and {name}64")
    try:
        return base64.urlsafe_b64decode(str(data[name + "64"]).encode("ascii")).decode("utf-8")
    except ValueError:
        raise InvalidInput(name + "64", "not base64 of UTF-8 text") from None
