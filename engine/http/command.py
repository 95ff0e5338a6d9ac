"""What a server that goes away in the middle of a command means."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from moebus.engine.http.server import EngineServer
from moebus.engine.port import EngineUnknown, EngineUnreachable


class _HasServer(Protocol):
    _server: EngineServer


S = TypeVar("S", bound=_HasServer)
P = ParamSpec("P")
R = TypeVar("R")


def one_command(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """For a method of an adapter. EngineUnreachable says that nothing was asked; where the server answered a call with
    an effect first and is gone when its state is read back, that would not be true: EngineUnknown, then."""

    @wraps(method)
    def run(self: S, /, *given: P.args, **named: P.kwargs) -> R:
        before = self._server.answered
        try:
            return method(self, *given, **named)
        except EngineUnreachable as error:
            if self._server.answered == before:
                raise
            raise EngineUnknown(f"{error}; a call before that was answered, so it may have been done") from error

    return run
