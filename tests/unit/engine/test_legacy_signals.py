"""FastDeploy's legacy signals within one process: values, answers, races, leftovers."""

from __future__ import annotations

import re
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from moebus.engine.legacy_signals import (
    KV_CACHE,
    PREFIX_TREE,
    SHM,
    WEIGHTS,
    Holder,
    LegacyAnswer,
    LegacySignals,
    Signal,
    SignalError,
    Status,
    remove_signals,
)
from moebus.observability.clock import ManualClock
from moebus.schemas.errors import InvalidInput
from tests.support.background import Background

NORMAL, UPDATING, CLEARING, CLEARED = Status.NORMAL, Status.UPDATING, Status.CLEARING, Status.CLEARED
NAMES = (WEIGHTS, KV_CACHE, PREFIX_TREE)


@dataclass
class Host:
    """Signals in a folder; time moves by what is waited for, and `turn` is everybody else's turn meanwhile."""

    root: Path
    clock: ManualClock = field(default_factory=ManualClock)
    turn: Callable[[], object] = lambda: None

    def pause(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.turn()

    def asking(self) -> LegacySignals:
        return LegacySignals("8132", root=self.root, clock=self.clock, pause=self.pause)

    def signal(self, name: str) -> Signal:
        return Signal(name, "8132", root=self.root)

    def value(self, name: str) -> Status:
        signal = self.signal(name)
        found = signal.value
        signal.close()
        return found

    def values(self) -> list[Status]:
        return [self.value(name) for name in NAMES]

    def put(self, name: str, value: Status) -> None:
        signal = self.signal(name)
        signal.put(value)
        signal.close()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def holders(host: Host) -> Iterator[dict[str, list[Status]]]:
    """One holder of each signal, whose turn it is whenever somebody waits; what each was asked for, by name."""
    done: dict[str, list[Status]] = {name: [] for name in NAMES}
    with ExitStack() as stack:
        made = [
            stack.enter_context(Holder(name, "8132", done[name].append, passes_on=passes_on, root=host.root))
            for name, passes_on in ((WEIGHTS, KV_CACHE), (KV_CACHE, None), (PREFIX_TREE, None))
        ]
        host.turn = lambda: [holder.step() for holder in made]
        yield done


def test_values_and_names_are_fastdeploys() -> None:
    assert {status.name: int(status) for status in Status} == {
        "NORMAL": 0, "UPDATING": 1, "CLEARING": -1, "CLEARED": -2,
    }  # fmt: skip
    suffix = uuid.uuid4().hex[:12]
    theirs = shared_memory.SharedMemory(name=f"model_weights_status.{suffix}", create=True, size=4)
    try:
        signal = Signal(WEIGHTS, suffix)
        assert signal.swap(NORMAL, CLEARING)
        assert struct.unpack("<i", (SHM / f"model_weights_status.{suffix}").read_bytes()) == (-1,)
        assert theirs.buf is not None
        theirs.buf[:4] = struct.pack("<i", -2)
        assert signal.value is CLEARED
        signal.close()
    finally:
        theirs.close()
        theirs.unlink()
        remove_signals(suffix)


def test_clear_and_update(host: Host, holders: dict[str, list[Status]]) -> None:
    asking = host.asking()
    assert asking.serving()
    assert asking.update() == LegacyAnswer(200, "model weight is updated")
    assert asking.clear() == LegacyAnswer(200, "clear model weight successfully")
    assert host.values() == [CLEARED] * 3
    assert not asking.serving()
    assert asking.clear() == LegacyAnswer(200, "model weight is cleared")
    assert asking.update() == LegacyAnswer(200, "update model weight successfully")
    assert host.values() == [NORMAL] * 3
    assert asking.serving()
    assert holders == {name: [CLEARING, UPDATING] for name in NAMES}


@pytest.mark.parametrize(
    ("verb", "found", "answer"),
    [
        ("clear", CLEARING, (400, "worker is clearing model weight already")),
        ("clear", UPDATING, (403, "worker is updating model weight, cannot clear now")),
        ("update", UPDATING, (400, "worker is updating model weight already")),
        ("update", CLEARING, (403, "worker is clearing model weight, cannot update now")),
    ],
)
def test_an_operation_under_way(
    host: Host, holders: dict[str, list[Status]], verb: str, found: Status, answer: tuple[int, str]
) -> None:
    host.put(WEIGHTS, found)
    assert getattr(host.asking(), verb)() == LegacyAnswer(*answer)
    assert holders[WEIGHTS] == []


@pytest.mark.parametrize(
    ("lazy", "verb", "msg"),
    [
        (PREFIX_TREE, "clear", "clear prefix tree timeout"),
        (WEIGHTS, "clear", "clear model weight timeout"),
        (KV_CACHE, "clear", "clear model weight timeout"),
        (PREFIX_TREE, "update", "update prefix tree timeout"),
        (KV_CACHE, "update", "update model weight timeout"),
    ],
)
def test_waiting_has_a_deadline_and_names_who_did_not_answer(host: Host, lazy: str, verb: str, msg: str) -> None:
    start = NORMAL if verb == "clear" else CLEARED
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(Holder(name, "8132", lambda _: None, status=start, root=host.root))
            for name in NAMES
        }
        host.turn = lambda: [holder.step() for name, holder in made.items() if name != lazy]
        answer = getattr(host.asking(), verb)(timeout=300.0)
    assert (answer.status, answer.msg) == (404, msg)
    assert f"{lazy}.8132 is " in answer.detail
    assert 300 <= host.clock.monotonic() < 301


def test_a_request_that_is_made_meanwhile_is_not_overwritten(host: Host) -> None:
    """#5493: read, work, write back."""
    done: list[Status] = []

    def effect(asked: Status) -> None:
        done.append(asked)
        if asked is CLEARING:
            host.put(WEIGHTS, UPDATING)  # by somebody who knows no locks

    with Holder(WEIGHTS, "8132", effect, root=host.root) as holder:
        host.put(WEIGHTS, CLEARING)
        assert holder.step()
        assert holder.signal.value is UPDATING
        assert holder.step()
        assert (done, holder.signal.value) == ([CLEARING, UPDATING], NORMAL)
        assert not holder.step()


def test_a_request_that_was_overwritten_is_made_again(host: Host, holders: dict[str, list[Status]]) -> None:
    """#5493, the other side: FastDeploy's worker writes the old value over the request."""
    host.asking().clear()
    turns = host.turn
    lost: list[int] = []

    def lose_one() -> None:
        if not lost:
            lost.append(1)
            host.put(WEIGHTS, CLEARED)
        else:
            turns()

    host.turn = lose_one
    host.put(PREFIX_TREE, NORMAL)
    assert host.asking().update().status == 200
    assert holders[WEIGHTS] == [CLEARING, UPDATING]


def test_a_holder_does_one_thing_a_step_and_never_waits(host: Host, holders: dict[str, list[Status]]) -> None:
    """#5249: the worker stayed in the loop of the signals after a clear."""
    for _ in range(3):
        host.turn()
    assert holders == {name: [] for name in NAMES}
    host.put(WEIGHTS, CLEARING)
    host.turn()
    host.turn()
    assert holders[WEIGHTS] == [CLEARING]


@pytest.mark.parametrize("late", NAMES)
def test_nothing_is_served_before_everything_is_there(host: Host, holders: dict[str, list[Status]], late: str) -> None:
    """#5527: after a clear the model ran without weights or cache."""
    for value in (CLEARED, CLEARING, UPDATING):
        host.put(late, value)
        assert not host.asking().serving()
    host.put(late, NORMAL)
    assert host.asking().serving()


@pytest.mark.parametrize("left", NAMES)
def test_what_one_signal_says_does_not_stand_for_the_others(
    host: Host, holders: dict[str, list[Status]], left: str
) -> None:
    """#5930: with the weights cleared through another server, tree and cache were never cleared here."""
    for name in NAMES:
        host.put(name, NORMAL if name == left else CLEARED)
    assert host.asking().clear() == LegacyAnswer(200, "clear model weight successfully")
    assert host.values() == [CLEARED] * 3
    assert {name: done for name, done in holders.items() if done} == {left: [CLEARING]}


def test_a_failure_is_told_and_leaves_a_way_back(host: Host) -> None:
    """Failures of the cache process were swallowed and the caller waited for 300 s."""
    faulty = [True]

    def effect(asked: Status) -> None:
        if faulty[0]:
            raise OSError("no memory")

    with Holder(WEIGHTS, "8132", effect, root=host.root) as holder:
        host.turn = holder.step
        answer = host.asking().clear()
        assert (answer.status, answer.msg) == (404, "clear model weight failed")
        assert answer.detail == "model_weights_status.8132 is 0 (normal) after 3 requests"
        assert host.clock.monotonic() < 1
        faulty[0] = False
        assert host.asking().clear().status == 200


@pytest.mark.parametrize("left", Status)
def test_a_new_holder_overwrites_what_a_crashed_one_left(host: Host, left: Status) -> None:
    Holder(WEIGHTS, "8132", lambda _: None, root=host.root).close()
    host.put(WEIGHTS, left)
    with Holder(WEIGHTS, "8132", lambda _: None, root=host.root) as holder:
        host.turn = holder.step
        assert host.asking().serving()
        assert host.asking().clear().status == 200
        with pytest.raises(SignalError, match=r"model_weights_status\.8132 is held by another process"):
            Holder(WEIGHTS, "8132", lambda _: None, root=host.root)


@pytest.mark.parametrize("left", [CLEARING, UPDATING])
@pytest.mark.parametrize("name", NAMES)
def test_nobody_waits_for_a_holder_that_has_ended(
    host: Host, holders: dict[str, list[Status]], left: Status, name: str
) -> None:
    """Its leftover was taken for an operation under way, for ever."""
    gone = Host(host.root / "gone", host.clock)
    gone.root.mkdir()
    with ExitStack() as stack:
        for one in NAMES:
            holder = Holder(one, "8132", lambda _: None, root=gone.root)
            if one == name:
                holder.signal.put(left)
                holder.close()
            else:
                stack.push(holder)
        for ask in (gone.asking().clear, gone.asking().update):
            answer = ask()
            assert answer.status == 404
            assert re.match(rf"{name}\.8132 is -?1 .* the process that held it has ended; start that again", answer.msg)
    assert gone.clock.monotonic() == 0


def test_who_ends_while_it_is_waited_for_is_named(host: Host) -> None:
    holder = Holder(WEIGHTS, "8132", lambda _: None, root=host.root)
    host.turn = lambda: holder.close() if host.clock.monotonic() < 0.015 else None
    answer = host.asking().clear()
    assert answer.status == 404
    assert "the process that held it has ended" in answer.msg
    assert host.clock.monotonic() < 1


def test_without_signals(host: Host) -> None:
    assert not host.asking().serving()
    answer = host.asking().clear()
    assert (answer.status, "model_weights_status.8132 is not on this host" in answer.msg) == (404, True)


@pytest.mark.parametrize(("content", "said"), [(b"", "holds no 32-bit number"), (b"\x07\0\0\0", "is 7, which means")])
def test_a_signal_that_is_none(host: Host, content: bytes, said: str) -> None:
    (host.root / "model_weights_status.8132").write_bytes(content)
    answer = host.asking().clear()
    assert answer.status == 404
    assert said in answer.msg
    with Holder(WEIGHTS, "8132", lambda _: None, root=host.root):
        assert host.asking().serving()


@pytest.mark.parametrize("suffix", ["", "../x", "a/b", "a.b", "x" * 65])
def test_a_suffix_stays_in_the_folder(suffix: str) -> None:
    with pytest.raises(InvalidInput, match="suffix: "):
        LegacySignals(suffix)


def test_swaps_of_many_threads_lose_nothing(host: Host) -> None:
    """Each of two values is taken from the other exactly once a turn."""
    Holder(WEIGHTS, "8132", lambda _: None, root=host.root).close()
    won = [0, 0, 0, 0]
    start = threading.Barrier(4)

    def play(player: int) -> None:
        signal = host.signal(WEIGHTS)
        mine, other = (NORMAL, CLEARED) if player % 2 else (CLEARED, NORMAL)
        start.wait(30)
        for _ in range(300):
            won[player] += signal.swap(mine, other)
        signal.close()

    for call in [Background(lambda player=player: play(player)) for player in range(4)]:  # type: ignore[misc]
        call.result()
    assert sum(won[1::2]) - sum(won[0::2]) in (0, 1)
    assert host.value(WEIGHTS) is (CLEARED if sum(won[1::2]) > sum(won[0::2]) else NORMAL)
