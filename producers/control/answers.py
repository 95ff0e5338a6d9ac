"""The answers to one command, folded from the log's records in any order of arrival. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from moebus.broker.ports import Position
from moebus.schemas.control import ControlRequest
from moebus.schemas.control_args import DecideArgs, Verdict
from moebus.schemas.responses import ControlResponse, Phase

Place = tuple[int, int]
"""(partition, offset): the order of the log among the answers to one request, which share a partition."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An answer and where it lies."""

    place: Place
    response: ControlResponse


@dataclass(slots=True)
class Answers:
    """What is known of one command. Only answers with the command's own digest count; others are in `foreign`.

    `position` None: not acknowledged yet. `events`: every answer once, in the order of arrival.
    """

    request: ControlRequest
    position: Position | None = None
    provisional: tuple[str, ...] | None = None
    events: list[Placed] = field(default_factory=list)
    foreign: list[Placed] = field(default_factory=list)
    done: dict[str, Placed] = field(default_factory=dict)
    staged: dict[str, Placed] = field(default_factory=dict)
    _expected: Placed | None = None
    _decision: tuple[int, Verdict] | None = None
    _seen: set[Place] = field(default_factory=set)

    def add(self, response: ControlResponse, place: Place) -> bool:
        """Takes an answer in; False where it was there already or belongs to another digest."""
        if place in self._seen:
            return False
        self._seen.add(place)
        placed = Placed(place, response)
        if response.request_digest != self.request.digest:
            self.foreign.append(placed)
            return False
        self.events.append(placed)
        if response.phase is Phase.EXPECTED:
            self._expected = _first(self._expected, placed)
        elif response.worker_id is not None:
            self._add_worker(response.worker_id, placed)
        return True

    def _add_worker(self, worker: str, placed: Placed) -> None:
        if placed.response.phase is Phase.DONE:
            self.done[worker] = _first(self.done.get(worker), placed)
        elif placed.response.phase is Phase.STAGED:
            # A new boot stages again: the last one says what the worker holds.
            old = self.staged.get(worker)
            self.staged[worker] = placed if old is None or old.place < placed.place else old

    def add_decide(self, request: ControlRequest, offset: int) -> bool:
        """Takes a `decide` of the command log in; the first one behind the command is the decision."""
        args = request.command
        if not isinstance(args, DecideArgs) or args.request_id != self.request.request_id:
            return False
        if self.position is not None and offset < self.position.offset:
            return False
        if self._decision is None or offset < self._decision[0]:
            self._decision = (offset, args.decision)
            return True
        return False

    def merge(self, earlier: Answers) -> None:
        """Takes over what was found of the same identity before it was appended again; its first position counts."""
        self.position = earlier.position
        if earlier._decision is not None and (self._decision is None or earlier._decision[0] < self._decision[0]):
            self._decision = earlier._decision
        for placed in (*earlier.events, *earlier.foreign):
            self.add(placed.response, placed.place)

    @property
    def decision(self) -> Verdict | None:
        """The decision that the log holds."""
        return None if self._decision is None else self._decision[1]

    @property
    def expected(self) -> tuple[str, ...] | None:
        """Workers that should answer: the first list in the log, else the issuer's own before it was read back.
        None: nobody wrote one (a bare command from another client)."""
        return self.provisional if self._expected is None else self._expected.response.expected_workers

    @property
    def counted(self) -> tuple[str, ...]:
        """The expected workers; where there is no list, those that were heard of."""
        if self.expected is not None:
            return self.expected
        heard = {e.response.worker_id for e in self.events}
        return tuple(sorted(worker for worker in heard if worker is not None))


def _first(old: Placed | None, new: Placed) -> Placed:
    return new if old is None or new.place < old.place else old
