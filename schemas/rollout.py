"""Who a rollout is: run, rollout id, choice; its group; and the rule of prefixes.

A rollout id is any text of 1 to 255 bytes of UTF-8. One that parses as `{data}:{gen}:{turn}:{segment}` is
*structured*; any other is *opaque*. Both are valid wherever an id is asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from moebus.schemas.errors import InvalidInput

SEPARATOR = ":"
MAX_ID_BYTES = 255
MAX_CHOICE = 65_535
MAX_EPOCH = 2**63 - 1
MAX_TURN = 2**31 - 1

_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}")  # [0-9] and not \d: full-width digits are no digits here


@dataclass(frozen=True, slots=True, order=True)
class RolloutId:
    """A structured id. `data` may hold colons; `gen` is any text without one; turn and segment count from 0."""

    data: str
    gen: str
    turn: int
    segment: int

    def __str__(self) -> str:
        return f"{self.data}:{self.gen}:{self.turn}:{self.segment}"

    @classmethod
    def parse(cls, text: str) -> RolloutId:
        """Reads `{data}:{gen}:{turn}:{segment}`; nothing is ever evaluated.

        Raises:
            InvalidInput: field `rollout_id`, naming the part that is wrong. Such a text is still a valid opaque id.
        """
        check_rollout_id(text)
        parts = text.rsplit(SEPARATOR, 3)
        if len(parts) != 4:
            raise InvalidInput("rollout_id", f"{text!r} has not the four parts data:gen:turn:segment")
        data, gen, turn, segment = parts
        if not data or not gen:
            raise InvalidInput("rollout_id", f"{text!r} has an empty {'data' if not data else 'gen'} part")
        return cls(data, gen, _count("turn", turn, text), _count("segment", segment, text))


def _count(part: str, text: str, whole: str) -> int:
    if not _DECIMAL.fullmatch(text) or int(text) > MAX_TURN:
        raise InvalidInput("rollout_id", f"{part} {text!r} of {whole!r} is not a plain decimal from 0 to {MAX_TURN}")
    return int(text)


def structured(rollout_id: str) -> RolloutId | None:
    """The parts of a structured id, None for an opaque one."""
    try:
        return RolloutId.parse(rollout_id)
    except InvalidInput:
        return None


@dataclass(frozen=True, slots=True, order=True)
class RolloutKey:
    """Identity of a rollout: `run`, `rollout_id` and `choice` (index of the sample in its request, u16)."""

    run: str
    rollout_id: str
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.run}/{self.rollout_id}#{self.choice}"


def rollout_key(run: str, rollout_id: str, choice: int = 0) -> RolloutKey:
    """A checked `RolloutKey`.

    Raises:
        InvalidInput: field `run`, `rollout_id` or `choice`.
    """
    return RolloutKey(check_run(run), check_rollout_id(rollout_id), check_choice(choice))


def check_run(run: str) -> str:
    """`run` itself. Raises InvalidInput unless it is 1 to 64 of `[A-Za-z0-9._-]`."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise InvalidInput("run", f"{_short(run)} is not 1 to 64 characters of A-Z a-z 0-9 . _ -")
    return run


def check_rollout_id(text: str, field: str = "rollout_id") -> str:
    """`text` itself. Raises InvalidInput unless it is 1 to 255 bytes of UTF-8."""
    if not isinstance(text, str):
        raise InvalidInput(field, f"a string is needed, not {type(text).__name__}")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidInput(field, f"{_short(text)} is not valid UTF-8") from None
    if not 1 <= size <= MAX_ID_BYTES:
        raise InvalidInput(field, f"{_short(text)} has {size} bytes of UTF-8; 1 to {MAX_ID_BYTES} are allowed")
    return text


def check_choice(choice: int) -> int:
    """`choice` itself. Raises InvalidInput unless it is an integer from 0 to 65,535."""
    return _integer("choice", choice, MAX_CHOICE)


def check_epoch(epoch: int) -> int:
    """`epoch` itself. Raises InvalidInput unless it is an integer from 0 to 2^63 - 1."""
    return _integer("epoch", epoch, MAX_EPOCH)


def _integer(field: str, value: int, highest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= highest:
        raise InvalidInput(field, f"{_short(value)} is not an integer from 0 to {highest}")
    return value


@lru_cache(maxsize=256)  # a submit asks for it several times, on the thread of the generation step
def default_group(rollout_id: str) -> str:
    """The group where none was named: `data` of a structured id, else the id itself."""
    parts = structured(rollout_id)
    return parts.data if parts else rollout_id


def check_group(group: str) -> str:
    """`group` itself. Raises InvalidInput unless it is 1 to 255 bytes of UTF-8."""
    return check_rollout_id(group, "group")


def partition_key(run: str, group: str) -> bytes:
    """The Kafka key `{run}/{group}`: all rollouts of a group share a partition, and so an order."""
    return f"{run}/{group}".encode()


def check_prefix(prefix: str) -> str:
    """`prefix` itself.

    Raises:
        InvalidInput: field `prefix`; empty (the whole run: that is `clear`), ending in `:`, or too long.
    """
    if prefix == "":
        raise InvalidInput("prefix", "empty; to remove a whole run use clear")
    check_rollout_id(prefix, "prefix")
    if prefix.endswith(SEPARATOR):
        raise InvalidInput("prefix", f"{_short(prefix)} ends in ':'; leave the last ':' out")
    return prefix


def covers(prefix: str, rollout_id: str) -> bool:
    """Whether `prefix` removes `rollout_id`: it is equal, or continues with `:` (`a:1` never covers `a:10`)."""
    return rollout_id == prefix or rollout_id.startswith(prefix + SEPARATOR)


def ancestors(rollout_id: str) -> list[str]:
    """Every valid prefix that covers `rollout_id`, shortest first."""
    cuts = [i for i, char in enumerate(rollout_id) if char == SEPARATOR]
    found = [rollout_id[:cut] for cut in cuts] + [rollout_id]
    return [prefix for prefix in found if prefix and not prefix.endswith(SEPARATOR)]


def same_segment(a: RolloutId, b: RolloutId) -> bool:
    """Whether two structured ids are turns of one data, gen and segment (`keep=last_turn` keeps the highest)."""
    return (a.data, a.gen, a.segment) == (b.data, b.gen, b.segment)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
