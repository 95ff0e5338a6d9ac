"""What became of a call whose answer was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

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


def once_more(call: Callable[[], object]) -> None:
    """For a call that may be made twice: where the connection broke it is made again, where it was late it is not."""
    try:
        call()
    except EngineUnknown as error:
        if error.late:
            raise
        call()


def take_back(error: MoebusError, undo: Callable[[], object]) -> NoReturn:
    """Ends a pause that failed on a server which tells of no pause under way: `undo` (a resume) opens admission again.

    Raises:
        EngineUnknown: that failed too.  EngineTimeout: what became of the pause was not known.  Otherwise `error`.
    """
    try:
        undo()
    except MoebusError as failure:
        raise EngineUnknown(f"{error}; opening admission again failed too: {failure}") from error
    if isinstance(error, EngineUnknown):
        raise EngineTimeout(f"pause: {error}; admission is open again") from error
    raise error
