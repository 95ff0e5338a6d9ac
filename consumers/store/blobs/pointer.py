"""Where a blob lies among objects, as the entry of the index says it, and how objects are named.

An object holds chunks of one attempt that were committed together. Its name is used once and never again, whatever
crashes and rebuilds there are: `boot` is drawn anew for every life of a partition and after every batch that failed.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

_ENTRY = struct.Struct(">QIIII16s")
_NAME = re.compile(r"([0-9a-f]{16})/([0-9a-f]{8})-([0-9a-f]{16})-([0-9a-f]{8})-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class ObjectName:
    """`serial` counts the objects of a boot. `owner`, `first`: of the first chunk in it, so that its entry is found."""

    boot: int
    serial: int
    owner: int
    first: int
    attempt: bytes

    def __str__(self) -> str:
        return f"{self.boot:016x}/{self.serial:08x}-{self.owner:016x}-{self.first:08x}-{self.attempt.hex()}"

    @classmethod
    def parse(cls, text: str) -> ObjectName | None:
        """None for a name that is none of ours."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        boot, serial, owner, first, attempt = match.groups()
        return cls(int(boot, 16), int(serial, 16), int(owner, 16), int(first, 16), bytes.fromhex(attempt))


@dataclass(frozen=True, slots=True)
class Pointer:
    """Bytes [offset, offset + size) of an object."""

    name: ObjectName
    offset: int
    size: int

    def pack(self) -> bytes:
        """The owner is part of the entry's key."""
        name = self.name
        return _ENTRY.pack(name.boot, name.serial, name.first, self.offset, self.size, name.attempt)

    @classmethod
    def unpack(cls, owner: int, entry: bytes) -> Pointer:
        """Raises struct.error for what is no entry of ours."""
        boot, serial, first, offset, size, attempt = _ENTRY.unpack(entry)
        return cls(ObjectName(boot, serial, owner, first, attempt), offset, size)


def follows(one: Pointer, other: Pointer) -> bool:
    """Whether `other` begins where `one` ends."""
    return one.name == other.name and one.offset + one.size == other.offset
