"""Every interleaving of an update's decision ends at one version, or TAINTED or BEHIND; two versions never serve.

Controllers may die before, between and after the votes (a model where one never moves again is part of every model); a
worker may read the update or the decision long after the deadline; decisions may be written late, twice and both ways.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moebus.engine.port import Deadline, EngineFailed, EngineRefused, EngineTainted
from moebus.engine.simulated import SimulatedEngine
from moebus.schemas.errors import MoebusError
from tests.support.decision_model import Model

Plan = Callable[[SimulatedEngine], None]


def fails(method: str, error: MoebusError) -> Plan:
    return lambda engine: engine.fail_next(method, error)


def cannot_stage_again(engine: SimulatedEngine) -> None:
    """The first process of the worker stages; a second one cannot."""
    calls: list[str] = []

    def hook(point: str, subject: str, deadline: Deadline | None) -> None:
        calls.append(point)
        if point == "stage" and calls.count("stage") > 1:
            raise EngineRefused("planned")

    engine.hook = hook


PLANS: dict[str, Plan | None] = {
    "all well": None,
    "w2 cannot stage": fails("stage", EngineRefused("planned")),
    "w2 cannot commit": fails("commit", EngineFailed("planned")),
    "w2 is cut off in the commit": fails("commit", EngineTainted("planned")),
}
OLD, NEW = "PAUSED initial", "PAUSED v2"
ENDS = {
    "all well": {(OLD, OLD), (NEW, NEW)},
    "w2 cannot stage": {(OLD, OLD)},
    "w2 cannot commit": {(OLD, OLD), (NEW, "BEHIND initial")},
    "w2 is cut off in the commit": {(OLD, OLD), (NEW, "TAINTED None")},
}


def explore(model: Model) -> set[tuple[str, ...]]:
    """Checks every world; the states in which the workers may end."""
    ends = set()
    for world in model.worlds():
        model.check(world)
        if model.quiet(world):
            seen = [model.seen(world, number) for number in range(2)]
            ends.add(tuple(f"{one.lifecycle} {one.version}" for one in seen))
    return ends


@pytest.mark.parametrize("name", PLANS)
def test_two_controllers_that_both_decide_or_die(name: str) -> None:
    assert explore(Model(PLANS[name])) == ENDS[name]


@pytest.mark.parametrize(("name", "resumes"), [("all well", 1), ("w2 is cut off in the commit", 2)])
def test_somebody_opens_traffic_at_any_time(name: str, resumes: int) -> None:
    ends = explore(Model(PLANS[name], controllers=1, resumes=resumes))
    assert ENDS[name] <= ends
    assert ("RUNNING v2", "RUNNING v2" if name == "all well" else "TAINTED None") in ends
    assert ("RUNNING initial", "RUNNING initial") in ends


@pytest.mark.parametrize(("plan", "resumes"), [(None, 1), (cannot_stage_again, 2)], ids=["well", "cannot stage again"])
def test_a_worker_restarts_after_its_vote(plan: Plan | None, resumes: int) -> None:
    ends = explore(Model(plan, controllers=1, resumes=resumes, restarts=True))
    assert ("RUNNING v2", "RUNNING v2" if plan is None else "BEHIND initial") in ends


@pytest.mark.parametrize(("kind", "fault"), [("void", "two versions stay"), ("commit", "two versions stay")])
def test_the_check_notices_a_worker_that_misses_a_decision(kind: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        explore(Model(deaf=kind))
