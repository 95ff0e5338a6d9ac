"""Work that can wait: when it rests, for whom, and that nobody holds it up for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moebus.consumers.store.courtesy import LOOK, MOST, REST, WORK, Courtesy


class Time:
    """Moves only where somebody works or sleeps. `then`: happens after each sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.then: Callable[[], None] = lambda: None

    def work(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.then()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def courtesy(time: Time) -> Courtesy:
    made = Courtesy(lambda: time.now, time.sleep)
    made.begin()
    return made


def test_it_rests_after_a_piece_of_work_and_not_before(time: Time, courtesy: Courtesy) -> None:
    for _ in range(4):
        time.work(WORK * 0.4)
        courtesy.give_way()
    assert time.slept == [REST]
    assert courtesy.rested == pytest.approx(REST)


def test_who_waits_for_an_answer_goes_first(time: Time, courtesy: Courtesy) -> None:
    waiting = courtesy.answering()
    waiting.__enter__()

    def answer() -> None:
        if len(time.slept) == 4:
            waiting.__exit__(None, None, None)

    time.then = answer
    time.work(WORK)
    courtesy.give_way()
    assert time.slept == [REST, LOOK, LOOK, LOOK]


def test_an_answer_that_fails_is_waited_for_no_longer(time: Time, courtesy: Courtesy) -> None:
    with pytest.raises(LookupError), courtesy.answering():
        raise LookupError
    time.work(WORK)
    courtesy.give_way()
    assert time.slept == [REST]


def test_a_slice_comes_to_its_end_though_somebody_always_waits(time: Time, courtesy: Courtesy) -> None:
    with courtesy.answering():
        for _ in range(1000):
            time.work(WORK)
            courtesy.give_way()
        assert courtesy.rested <= MOST + LOOK + 1000 * REST
        before = courtesy.rested
        courtesy.begin()  # the next slice is patient again
        time.work(2 * WORK)
        courtesy.give_way()
        assert courtesy.rested - before >= MOST
