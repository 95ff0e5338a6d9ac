"""What a worker knows of a server that does not tell it, kept on disk for the worker's next process."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moebus.engine.http.belief import Belief
from moebus.observability.log import get_logger
from moebus.schemas.tags import ALL_TAGS, Tag

_log = get_logger(__name__)
_PLAIN = ("life", "sure", "level", "weights", "version", "source", "frozen", "paused", "open_update")


def default_home() -> Path:
    """`$MOEBUS_HOME`, else `$XDG_STATE_HOME/moebus`."""
    home = os.environ.get("MOEBUS_HOME")
    if home:
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser().absolute() / "moebus"


class Notes:
    """One file a server, `engines/HOST_PORT.json` below `home`, replaced whole. `home=None`: nothing is kept.

    A belief is written before the call that it announces and again after it, so that a worker that was killed between
    the two comes back unsure. A disk that cannot be written is a warning: the worker goes on without its memory.
    """

    def __init__(self, home: Path | None, url: str) -> None:
        place = re.sub(r"[^A-Za-z0-9.-]+", "_", url.partition("://")[2])[-120:]
        self.path = None if home is None else home / "engines" / f"{place}.json"

    def read(self) -> Belief | None:
        """The last belief written; None where there is none that can be read."""
        if self.path is None:
            return None
        try:
            found = json.loads(self.path.read_text())
            return _belief(found)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("engine.notes_unreadable", f"{self.path}: {error}; the state of the server is unknown")
            return None

    def write(self, belief: Belief) -> None:
        if self.path is None:
            return
        values: dict[str, Any] = {name: getattr(belief, name) for name in _PLAIN}
        values["resident"] = {str(tag): held for tag, held in belief.resident.items()}
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(values))
            draft.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            _log.warning("engine.notes_unwritable", f"{self.path}: {error}; a restarted worker will know less")


_TEXT, _FLAG = (str, type(None)), (bool,)
_TYPES: dict[str, tuple[type, ...]] = {
    "life": (str,), "sure": _FLAG, "level": _TEXT, "weights": (str,), "version": _TEXT, "source": _TEXT,
    "frozen": (int,), "paused": _FLAG, "open_update": _FLAG,
}  # fmt: skip


def _belief(found: dict[str, Any]) -> Belief:
    values = {name: found[name] for name in _PLAIN}
    resident = {Tag(name): held for name, held in found["resident"].items()}
    for name, value in values.items():
        if not isinstance(value, _TYPES[name]):
            raise ValueError(f"{name} is {value!r}")
    if values["weights"] not in ("valid", "empty", "mixed") or values["level"] not in (None, "offload", "discard"):
        raise ValueError("unknown words")
    if set(resident) != set(ALL_TAGS) or not all(isinstance(held, bool) for held in resident.values()):
        raise ValueError(f"resident is {found['resident']!r}")
    return Belief(**values, resident=MappingProxyType(resident))
