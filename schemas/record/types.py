"""The four records of the routes topic as values. `docs/wire-format.md` has their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from moebus.schemas.attempt import attempt_text
from moebus.schemas.rollout import RolloutKey, default_group, partition_key

CodecName = Literal["raw", "zstd"]
Status = Literal["complete", "partial", "aborted", "missing"]
Versions = tuple[tuple[int, str], ...]
"""Weight versions by row: ((first_row, version), ...), ascending; each holds up to the next one's first row."""


class Kind(IntEnum):
    """The kind byte."""

    CHUNK = 1
    END = 2
    DELETE = 3
    CLEAR = 4


@dataclass(frozen=True, slots=True)
class Base:
    """The END whose rows [0, rows) an attempt goes on from: same run, same group.

    `attempt`: 16 bytes. `token_hash`: over the token ids of the rows used, None where they were not known.
    """

    attempt: bytes
    rows: int
    rollout_id: str
    choice: int = 0
    token_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What CHUNK and END say of their attempt. `attempt`: ULID, 16 bytes. `group` is always written out."""

    run: str
    group: str
    rollout_id: str
    choice: int
    attempt: bytes
    epoch: int = 0
    base: Base | None = None

    @classmethod
    def of(
        cls, key: RolloutKey, attempt: bytes, *, group: str | None = None, epoch: int = 0, base: Base | None = None
    ) -> Header:
        """With the default group of the id where none is named."""
        group = default_group(key.rollout_id) if group is None else group
        return cls(key.run, group, key.rollout_id, key.choice, attempt, epoch, base)

    @property
    def key(self) -> RolloutKey:
        return RolloutKey(self.run, self.rollout_id, self.choice)

    @property
    def attempt_text(self) -> str:
        return attempt_text(self.attempt)

    @property
    def own_start(self) -> int:
        """First row that this attempt sends itself."""
        return self.base.rows if self.base else 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, start + rows) of one attempt, absolute: base rows count.

    `payload`: the rows [rows, layers, top_k] packed by `codec`; `unpack` gives the array. `versions` cover exactly
    these rows: the first entry's row is `start`; () where unknown.
    """

    header: Header
    index: int
    start: int
    rows: int
    layers: tuple[int, ...]
    top_k: int
    num_experts: int
    codec: CodecName
    payload: bytes
    versions: Versions = ()
    kind = Kind.CHUNK


@dataclass(frozen=True, slots=True)
class End:
    """Commits an attempt of `chunks` chunks. `rows`: all rows, base included; `header.own_start` is its own start.

    `checksum`: `whole_checksum` of its chunks. `token_hash`: over the token ids of all rows. `prompt_rows`,
    `prompt_hash`: the same for the prompt. `card_digest`: `ModelCard.digest`. None where not known.
    """

    header: Header
    rows: int
    chunks: int
    checksum: int
    status: Status = "complete"
    finish_reason: str = ""
    card_digest: str | None = None
    token_hash: str | None = None
    prompt_rows: int | None = None
    prompt_hash: str | None = None
    kind = Kind.END


@dataclass(frozen=True, slots=True)
class Delete:
    """Removes what `prefix` covers, all choices, in epochs <= `epoch`. `id`: 16 bytes, one for all partitions."""

    run: str
    prefix: str
    id: bytes
    epoch: int = 0
    kind = Kind.DELETE

    def __str__(self) -> str:
        return f"delete {self.run}/{self.prefix} (epoch <= {self.epoch})"


@dataclass(frozen=True, slots=True)
class Clear:
    """Removes and refuses every epoch <= `through_epoch` of a run. `id`: 16 bytes, one for all partitions."""

    run: str
    through_epoch: int
    id: bytes
    kind = Kind.CLEAR

    def __str__(self) -> str:
        return f"clear {self.run} (epoch <= {self.through_epoch})"


Record = Chunk | End | Delete | Clear


def record_key(record: Record) -> bytes:
    """The Kafka key: `{run}/{group}`; `{run}/` of a DELETE or CLEAR, which goes to every partition by number."""
    if isinstance(record, (Chunk, End)):
        return partition_key(record.header.run, record.header.group)
    return partition_key(record.run, "")
