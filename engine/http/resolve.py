"""What became of a call whose answer was lost."""

from __future__ import annotations

from collections.abc import Callable

from moebus.engine.port import EngineFailed, EngineTimeout, EngineUnknown
from moebus.schemas.errors import MoebusError


def resolved(
    call: Callable[[], object],
    happened: Callable[[], bool | None],
    life: Callable[[], str],
    before: str,
    *,
    late_proof: bool = True,
) -> None:
    """Makes `call`; where its answer is lost, the server's state decides. `happened` looks: True or False where the
    state proves it, None where it does not. `life`: identity of the server, `before`: the call. `late_proof=False`:
    nothing proves a call that was late, as its effect has a beginning and an end.

    A call that is late with a whole connection is still under way at the server, so "not yet" proves nothing.

    Raises:
        EngineFailed: it is proven that it did not happen, or the server has lost its memory since.
        EngineUnknown: nothing is proven.  Others as `call`.
    """
    try:
        call()
    except EngineUnknown as error:
        if error.late and not late_proof:
            raise
        if _proof(happened, life, before, error) is True:
            return
        raise


def _proof(
    happened: Callable[[], bool | None], life: Callable[[], str], before: str, error: EngineUnknown
) -> bool | None:
    try:
        found = happened()
        same = life() == before
    except MoebusError:
        return None
    if not same:
        raise EngineFailed(f"{error}; the server has restarted since, what it held is lost") from error
    if found is False and not error.late:
        raise EngineFailed(f"{error}; the server's state shows that it was not") from error
    return found


def undo_late(error: MoebusError, undo: Callable[[], object], what: str) -> EngineTimeout:
    """The timeout to raise after a late pause: `undo` (a resume) opens admission again as the port asks."""
    try:
        undo()
    except MoebusError as failure:
        return EngineTimeout(f"{what}: {error}; opening admission again failed too: {failure}")
    return EngineTimeout(f"{what}: {error}; admission is open again")
