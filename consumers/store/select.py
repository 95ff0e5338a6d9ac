"""Which attempt answers a question, or why none does: a pure function."""

from __future__ import annotations

from collections.abc import Sequence

from moebus.consumers.store.state import AttemptState
from moebus.schemas.attempt import attempt_text
from moebus.schemas.rollout import RolloutKey
from moebus.schemas.route_errors import (
    AmbiguousAttempt,
    RouteCorrupt,
    RouteDeleted,
    RouteError,
    RouteNeverComing,
    RouteNotYet,
)

_ADVICE = {
    "other_model": "its experts, top-k or layers are not those of the model that this run began with: use a run of its "
    "own for another model, or clear the run and raise the epoch",
}


def select(key: RolloutKey, held: Sequence[AttemptState], attempt: bytes | None, fence: str | None) -> AttemptState:
    """`held`: every attempt under `key`, of all partitions. `attempt`: the one asked for, None for any.
    `fence`: what deletes the id, where nothing is held.

    Of several whole attempts the complete one answers; where none is complete, the newest.

    Raises:
        RouteNotYet, RouteNeverComing, RouteDeleted, RouteCorrupt, AmbiguousAttempt
    """
    named = f"{key} attempt {attempt_text(attempt)}" if attempt is not None else str(key)
    found = [state for state in held if attempt is None or state.header.attempt == attempt]
    whole = [state for state in found if state.state == "whole" and state.end is not None]
    if not whole:
        raise _none(named, found, fence if attempt is None else None)
    groups = sorted({state.header.group for state in whole})
    if len(groups) > 1:
        raise AmbiguousAttempt(f"{named} is whole in the groups {', '.join(groups)}; name the group or the attempt")
    complete = [state for state in whole if state.end is not None and state.end.status == "complete"]
    if len(complete) > 1:
        texts = ", ".join(state.header.attempt_text for state in complete)
        raise AmbiguousAttempt(f"{named} has several complete attempts ({texts}); name one")
    return max(complete or whole, key=lambda state: state.header.attempt)


def _none(named: str, found: Sequence[AttemptState], fence: str | None) -> RouteError:
    by_state = {state.state: state for state in found}
    if "open" in by_state:
        return RouteNotYet(f"{named}: not all of its records are there yet")
    if "spoilt" in by_state:
        reason = by_state["spoilt"].reason
        return RouteCorrupt(f"{named}: spoilt ({reason}); {_ADVICE.get(reason, 'send it again as a new attempt')}")
    if "lost" in by_state:
        return RouteNeverComing(f"{named}: lost ({by_state['lost'].reason})")
    if "gone" in by_state:
        return RouteDeleted(f"{named}: {by_state['gone'].reason}")
    if fence is not None:
        return RouteDeleted(f"{named}: {fence}")
    return RouteNotYet(f"{named}: nothing of it has been read yet")
