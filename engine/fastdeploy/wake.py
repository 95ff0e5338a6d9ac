"""Waking FastDeploy without serving: its wakeup opens admission, a pause has to stand in line behind it."""

from __future__ import annotations

from threading import Thread

from moebus.engine.fastdeploy.api import Api
from moebus.engine.http.span import Least
from moebus.engine.port import Deadline, EngineUnknown
from moebus.schemas.errors import MoebusError

CLOSE_S = 65.0
"""FastDeploy gives a pause 60 s."""


class Waking:
    """The server carries out control calls one by one, in order with the requests it takes in. So the pause is sent as
    soon as the wakeup has left: what comes in while it wakes is refused, and only what came in between the two is
    admitted, to be aborted at once."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def wake(self, tags: str, deadline: Deadline) -> None:
        """Afterwards admission is closed.

        Raises:
            EngineUnknown: it could not be closed again, or it is not known what woke.  Others as `Api.memory`.
        """
        least = Least(deadline, CLOSE_S)
        behind = Thread(target=self._close, args=(least,), name="moebus-fastdeploy-pause", daemon=True)
        try:
            self._api.memory("wakeup", tags, deadline, behind.start)
        except MoebusError as error:
            if behind.ident is not None:
                self._shut(behind, least, error)
            raise
        self._shut(behind, least, None)

    def _close(self, deadline: Deadline) -> None:
        try:
            self._api.pause(deadline)
        except MoebusError:
            return  # `_shut` sees it

    def _shut(self, behind: Thread, deadline: Deadline, error: MoebusError | None) -> None:
        """The pause in line may have come first, or have failed: another one, which does nothing where it is closed."""
        behind.join(max(deadline.remaining(), 0.0))
        try:
            self._api.pause(deadline)
            closed = self._api.is_paused()
        except MoebusError as failure:
            raise EngineUnknown(f"{error or 'woken'}; it may serve, as the pause behind failed: {failure}") from error
        if not closed:
            raise EngineUnknown(f"{error or 'woken'}; it serves, although a pause behind the wakeup succeeded")
