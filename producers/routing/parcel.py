"""What travels from `submit` to whoever sends: a rollout as it is to be encoded, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebus.broker.ports import Position
from moebus.producers.routing.submission import OVERHEAD_BYTES, Submission
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import CodecName, Header, Outcome, Versions
from moebus.schemas.record.layout import TARGET_CHUNK_BYTES

MAX_AGE_MS = 20 * 3600 * 1000
"""What is older is not sent any more: the fences that could refuse it may have left the topic (48 h)."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One attempt with all that its records follow from: sent again it gives the same bytes.

    `rows`: [n, layers, top_k], any integer type, ids in range; until a sender took the parcel they may be the
    caller's memory. `created_ms`: Unix milliseconds of the submit.
    """

    name: str
    rows: npt.NDArray[np.integer]
    header: Header
    outcome: Outcome
    versions: Versions
    card: ModelCard
    created_ms: int
    traceparent: str | None = None
    codec: CodecName = "zstd"
    target: int = TARGET_CHUNK_BYTES

    @classmethod
    def of(cls, submission: Submission, created_ms: int, traceparent: str | None) -> Parcel:
        return cls(
            submission.name, submission.rows, submission.header, submission.outcome, submission.versions,
            submission.card, created_ms, traceparent,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """What it counts for in a bound of bytes."""
        return self.rows.size * self.card.dtype.itemsize + OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Sent:
    """Acknowledged. `positions`: of the END of a rollout; of every record of a fence, one a partition. `kinds`:
    records by kind; `wire_bytes`: bytes of their values."""

    positions: tuple[Position, ...]
    kinds: dict[str, int]
    wire_bytes: int

    @property
    def records(self) -> int:
        return sum(self.kinds.values())


Settle = Callable[["Sent | Exception"], None]
"""Called exactly once, on a thread of the publisher."""
