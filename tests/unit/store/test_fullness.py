from __future__ import annotations

import random

import pytest

from moebus.consumers.store.disk import fair_room
from moebus.consumers.store.fullness import LONGEST_WAIT, SAY_EVERY, Stops

ROOM = 1000


def test_by_level_it_goes_on_below_a_lower_level() -> None:
    stops = Stops()
    assert stops.stop(0, 7, 950, ROOM, lost=False, now=0.0)
    assert not stops.may_resume(0, 901, ROOM, 0.0)
    assert stops.may_resume(0, 899, ROOM, 0.0)
    assert stops.resume(0)
    assert stops.say_resumed(0)
    assert not stops.standing


def test_after_a_lost_batch_it_is_on_trial_after_a_growing_while() -> None:
    stops = Stops()
    now, said, waits = 0.0, [], []
    for _ in range(12):
        said.append(stops.stop(0, 7, 500, ROOM, lost=True, now=now))
        began = now
        while not stops.may_resume(0, 500, ROOM, now):
            now += 0.25
        waits.append(now - began)
        assert not stops.resume(0)  # not sure: it still counts as full
        assert not stops.passed(0, 7)  # a commit that took in nothing shows nothing
    assert said == [True] + [False] * 11
    assert waits == [1, 2, 4, 8, 16, 32] + [LONGEST_WAIT] * 6
    assert stops.passed(0, 8)
    assert stops.say_resumed(0)
    assert not stops.passed(0, 9)
    assert not stops.say_resumed(0)
    assert stops.stop(0, 9, 500, ROOM, lost=True, now=now + SAY_EVERY)
    assert not stops.may_resume(0, 500, ROOM, now + SAY_EVERY + 0.9)  # it begins with short waits again
    assert stops.may_resume(0, 500, ROOM, now + SAY_EVERY + 1.0)


@pytest.mark.parametrize(("used", "room"), [(450, ROOM), (500, 1112)])
def test_a_lost_batch_is_tried_again_at_once_when_the_fill_changed(used: int, room: int) -> None:
    stops = Stops()
    stops.stop(0, 7, 500, ROOM, lost=True, now=0.0)
    assert not stops.may_resume(0, 500, ROOM, 0.0)
    assert stops.may_resume(0, used, room, 0.0)


def test_failing_while_it_stands_still_does_not_make_it_wait_for_ever() -> None:
    stops = Stops()
    stops.stop(0, 7, 500, ROOM, lost=False, now=0.0)
    for tick in range(100):
        assert not stops.stop(0, 7, 500, ROOM, lost=True, now=tick / 100)
    assert not stops.may_resume(0, 500, ROOM, 0.99)
    assert stops.may_resume(0, 500, ROOM, 1.0)


def test_one_that_fills_up_again_and_again_is_said_once_a_minute() -> None:
    stops = Stops()
    full = resumed = 0
    for second in range(300):
        full += stops.stop(0, second, 950, ROOM, lost=False, now=float(second))
        assert stops.resume(0)
        resumed += stops.say_resumed(0)
    assert full == resumed == 5
    assert stops.stop(1, 0, 950, ROOM, lost=False, now=300.0)  # of another one it is news


def test_beginning_anew_forgets_all_of_it() -> None:
    stops = Stops()
    stops.stop(0, 7, 500, ROOM, lost=True, now=0.0)
    stops.forget(0)
    assert not stops.standing
    assert not stops.passed(0, 8)


def test_whoever_comes_first_may_have_the_free_half_and_the_others_theirs() -> None:
    assert fair_room({0: 0, 1: 0, 2: 0, 3: 0}, 800, 0) == 500  # 800 less the 100 of each of the others
    assert fair_room({0: 500, 1: 0, 2: 0, 3: 0}, 300, 0) == 500
    assert fair_room({0: 500, 1: 0, 2: 0, 3: 0}, 300, 1) == 100
    assert fair_room({0: 200, 1: 200, 2: 0, 3: 0}, 400, 0) == 400
    assert fair_room({0: 0}, 800, 0) == 800


def test_where_others_took_the_disk_what_is_left_is_shared_in_proportion() -> None:
    held = {0: 700, 1: 0, 2: 50}  # half of 850 for three is 141; missing 0, 141, 91
    assert [fair_room(held, 0, one) - held[one] for one in held] == [0, 0, 0]
    assert [fair_room(held, 100, one) - held[one] for one in held] == [0, 60, 39]


@pytest.mark.parametrize("seed", range(5))
def test_nobody_starves_whatever_the_order_is(seed: int) -> None:
    rng = random.Random(seed)
    count, size = rng.randrange(1, 9), 8000
    held = dict.fromkeys(range(count), 0)
    for _ in range(4000):  # greedy ones, some of them more often
        one = min(rng.randrange(count), rng.randrange(count))
        if fair_room(held, size - sum(held.values()), one) > held[one]:
            held[one] += 1
        assert sum(held.values()) <= size
    late = rng.randrange(count)
    while fair_room(held, size - sum(held.values()), late) > held[late]:
        held[late] += 1
    assert held[late] >= size // 2 // count
