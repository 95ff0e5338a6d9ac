"""What a server's answer says: whether it failed, also behind a 200, and in which words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_FAILED = frozenset(("error", "failed", "failure", "fail"))
_WORDS = ("message", "msg", "detail", "error", "error_msg", "reason")
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is no failure. `body`: the decoded JSON, None where there is none, then `text`."""

    status: int
    body: Any
    text: str

    def field(self, name: str) -> Any:
        """A field of the JSON object; None where the answer is something else."""
        return self.body.get(name) if isinstance(self.body, dict) else None


def decoded(raw: bytes) -> Any:
    """The JSON of a body; None where it is empty or something else."""
    try:
        return json.loads(raw) if raw.strip() else None
    except ValueError:
        return None


def failed(body: Any) -> bool:
    """Whether the JSON of a 200 is a failure: `success: false`, `status: error`, an `error` or a number >= 400."""
    if not isinstance(body, dict):
        return False
    status = body.get("status")
    number = body.get("error_code", body.get("code"))
    return (
        body.get("success") is False
        or (isinstance(status, str) and status.lower() in _FAILED)
        or bool(body.get("error"))
        or body.get("object") == "error"
        or (isinstance(number, int) and not isinstance(number, bool) and number >= 400)
    )


def words(body: Any, text: str = "") -> str:
    """What an answer says went wrong, on one line of at most 300 characters."""
    found = _find(body)
    line = " ".join((found or text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _find(body: Any) -> str:
    if isinstance(body, str):
        return body
    if isinstance(body, dict):
        for name in _WORDS:
            if body.get(name):
                return _find(body[name])
        return ""
    return json.dumps(body) if body else ""
