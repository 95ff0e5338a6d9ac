"""Keys of the store's tables.

An attempt: run, 0x00, rollout id, 0xFF, choice (u16), attempt (16 bytes), integers big-endian. Neither byte occurs in
what stands before it, so the ids below a prefix are two ranges: `id 0xFF...` and `id : ...`. At most 339 bytes.
"""

from __future__ import annotations

from moebus.schemas.rollout import RolloutId, RolloutKey

_TAIL = 18


def attempt_key(key: RolloutKey, attempt: bytes) -> bytes:
    return choice_range(key) + attempt


def split_attempt_key(raw: bytes) -> tuple[RolloutKey, bytes]:
    """The inverse of `attempt_key`."""
    run, rollout_id = raw[: -_TAIL - 1].split(b"\0", 1)
    choice = int.from_bytes(raw[-_TAIL : -_TAIL + 2], "big")
    return RolloutKey(run.decode(), rollout_id.decode(), choice), raw[-16:]


def choice_range(key: RolloutKey) -> bytes:
    """What the keys of all attempts of one rollout start with."""
    return id_range(key.run, key.rollout_id) + key.choice.to_bytes(2, "big")


def id_range(run: str, rollout_id: str) -> bytes:
    """What the keys of all choices of one id start with."""
    return run_range(run) + rollout_id.encode() + b"\xff"


def run_range(run: str) -> bytes:
    """What all keys of a run start with."""
    return run.encode() + b"\0"


def prefix_ranges(run: str, prefix: str) -> tuple[bytes, bytes]:
    """What the keys of everything that `prefix` covers start with."""
    return run_range(run) + prefix.encode() + b":", id_range(run, prefix)


def fence_key(run: str, prefix: str) -> bytes:
    """Of a DELETE; with an empty prefix, of a CLEAR."""
    return run_range(run) + prefix.encode()


def turn_key(run: str, rollout_id: RolloutId, choice: int) -> bytes:
    """Of the highest complete turn of a data, gen, segment and choice."""
    name = f"{rollout_id.data}:{rollout_id.gen}".encode()
    return b"".join((run_range(run), name, b"\xff", rollout_id.segment.to_bytes(4, "big"), choice.to_bytes(2, "big")))


def owner_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def blob_key(owner: int, index: int) -> bytes:
    return owner_key(owner) + index.to_bytes(4, "big")


def piece_key(blob: bytes, number: int) -> bytes:
    """Behind the key of its blob, before the next blob's."""
    return blob + number.to_bytes(4, "big")


def time_key(kind: bytes, at_ms: int, key: bytes) -> bytes:
    """`kind`: one byte."""
    return kind + at_ms.to_bytes(8, "big") + key


def age_range(kind: bytes, run: str) -> bytes:
    """What the keys of a run's attempts start with, in order of their age; `kind`: one byte."""
    return kind + run_range(run)


def age_key(kind: bytes, run: str, at_ms: int, key: bytes) -> bytes:
    """At most 413 bytes."""
    return age_range(kind, run) + at_ms.to_bytes(8, "big") + key


def split_time_key(raw: bytes) -> tuple[int, bytes]:
    """(at_ms, key)."""
    return int.from_bytes(raw[1:9], "big"), raw[9:]
