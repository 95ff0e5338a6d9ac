"""Random traffic on the routes topic: puts in any order, late ones, retries, bases, deletes, clears. From one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import OutRecord
from moebus.observability.clock import ManualClock
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.record import Base, Clear, Delete, Outcome, encode, record_key
from moebus.schemas.record.decode import decode
from tests.support.routes import Attempt, attempt_id, make_attempt


@dataclass
class Traffic:
    """`step` once for each moment. `truth`: all rows of each attempt, its base's included. `contradicted`: attempts
    that other content was sent for. `pace`: seconds that a step may take at most."""

    seed: int
    topic: str
    partitions: int
    clock: ManualClock
    broker: MemoryBroker
    truth: dict[bytes, RouteArray] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    contradicted: set[bytes] = field(default_factory=set)
    pace: float = 3.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._writer = self.broker.writer("traffic")
        self._waiting: list[bytes] = []
        self._attempts: list[Attempt] = []
        self._epoch = 0
        self._serial = 0

    def step(self) -> None:
        """Up to a few things happen, then time goes on by up to `pace` seconds."""
        rng = self._random
        for _ in range(rng.randrange(4)):
            kind = rng.choices(["new", "retry", "other", "delete", "clear"], weights=[60, 12, 3, 5, 0.5])[0]
            self.counts[kind] = self.counts.get(kind, 0) + 1
            getattr(self, f"_{kind}")()
        for _ in range(rng.randrange(8)):
            if self._waiting:  # any of what waits: records of many attempts mix, some come very late
                place = rng.randrange(len(self._waiting)) if rng.random() < 0.7 else 0
                self._append(self._waiting.pop(place))
        if rng.random() < 0.02 and self._waiting:
            del self._waiting[rng.randrange(len(self._waiting))]  # never sent: an attempt that stays open
        self.clock.advance(rng.random() * self.pace)

    def some(self, rng: random.Random, count: int) -> list[Attempt]:
        """Attempts that were begun, more often late ones."""
        known = self._attempts[-300:] if rng.random() < 0.7 else list(self._attempts)
        return rng.sample(known, min(count, len(known)))

    def drain(self) -> None:
        """Everything that waits is sent."""
        for value in self._waiting:
            self._append(value)
        self._waiting.clear()

    def clear_all(self) -> None:
        """Ends every epoch so far."""
        self._fence(Clear("run", self._epoch, self._id()))

    def _id(self) -> bytes:
        self._serial += 1
        return attempt_id(self._serial)

    def _new(self) -> None:
        rng = self._random
        name = f"d{rng.randrange(12)}:{rng.randrange(12)}:{rng.randrange(12)}:{rng.randrange(2)}"
        epoch = self._epoch if rng.random() < 0.9 else max(0, self._epoch - 1)
        base, before = self._base(name)
        rows = rng.choice([0, 1, 5, 9, 14])
        prompt = rng.randrange(rows + 1)
        number = int.from_bytes(self._id(), "big")
        attempt = make_attempt(
            name, choice=rng.randrange(2), number=number, rows=rows, chunks=rng.choice([1, 2, 3]) if rows > 4 else 1,
            epoch=epoch, base=base, outcome=Outcome(prompt_rows=(base.rows if base else 0) + prompt),
        )  # fmt: skip
        self._attempts.append(attempt)
        own = attempt.routes
        self.truth[attempt.header.attempt] = np.concatenate([before, own]) if before is not None else own
        self._send(attempt)

    def _base(self, name: str) -> tuple[Base | None, RouteArray | None]:
        """Half of the time an earlier attempt of the group, whatever has become of it."""
        group = name.partition(":")[0]
        recent = self._attempts[-200:] if self._random.random() < 0.7 else self._attempts
        found = [one for one in recent if one.header.group == group]
        if not found or self._random.random() < 0.5:
            return None, None
        before = self._random.choice(found)
        rows = self.truth[before.header.attempt]
        used = len(rows)
        if not used:
            return None, None
        return Base(before.header.attempt, used, before.header.rollout_id, before.header.choice), rows

    def _send(self, attempt: Attempt) -> None:
        records = list(attempt.records)
        if self._random.random() < 0.3:
            self._random.shuffle(records)
        if self._random.random() < 0.6:  # at once; the others mix with what waits
            for value in records:
                self._append(value)
        else:
            self._waiting += records

    def _retry(self) -> None:
        """All of an attempt again, of any age: a publisher that did not hear of the first time."""
        if self._attempts:
            self._send(self._random.choice(self._attempts[-300:]))

    def _other(self) -> None:
        """Other content under the name of an attempt that has some."""
        if not self._attempts:
            return
        attempt = self._random.choice(self._attempts[-20:])
        if attempt.chunks and len(attempt.routes) >= len(attempt.chunks):
            header, count = attempt.header, len(attempt.chunks)
            wrong = make_attempt(
                header.rollout_id, choice=header.choice, number=int.from_bytes(header.attempt, "big"),
                rows=len(attempt.routes), chunks=count, epoch=header.epoch, base=header.base, seed=self._serial + 10**6,
            )  # fmt: skip
            self.contradicted.add(header.attempt)
            self._append(self._random.choice(wrong.chunks))

    def _delete(self) -> None:
        """A prefix of an id that was used, of any length; more often a long one."""
        rng = self._random
        if not self._attempts:
            return
        parts = rng.choice(self._attempts[-200:]).header.rollout_id.split(":")
        length = rng.choice([1, 2, 2, 3, 3, 4, 4, 4])
        self._fence(Delete("run", ":".join(parts[:length]), self._id(), max(0, self._epoch - rng.randrange(2))))
        if length == 1 or rng.random() < 0.2:  # whoever wants to use the ids again raises the epoch
            self._epoch += 1

    def _clear(self) -> None:
        if self._epoch:
            self._fence(Clear("run", self._epoch - 1, self._id()))

    def _fence(self, record: Delete | Clear) -> None:
        value = encode(record)
        for number in range(self.partitions):
            self._writer.append(OutRecord(self.topic, value, record_key(record), (), number)).result(5)

    def _append(self, value: bytes) -> None:
        self._writer.append(OutRecord(self.topic, value, record_key(decode(value)))).result(5)
