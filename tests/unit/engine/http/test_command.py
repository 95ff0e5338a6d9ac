"""A server that goes away behind a call that it answered was asked for something."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moebus.engine.http import EngineServer, one_command
from moebus.engine.port import EngineUnknown, EngineUnreachable


class Adapter:
    """Calls `steps` one after the other; its server answers as they say."""

    def __init__(self) -> None:
        self._server = EngineServer("http://127.0.0.1:9")

    def answered(self) -> None:
        self._server.answered += 1

    def gone(self) -> None:
        raise EngineUnreachable("it takes no connection")

    @one_command
    def pause(self, *steps: Callable[[], None]) -> str:
        """Raises what a step raises."""
        for step in steps:
            step()
        return "paused"


def test_nothing_was_asked_of_a_server_that_was_away() -> None:
    adapter = Adapter()
    adapter.answered()  # by the command before
    with pytest.raises(EngineUnreachable):
        adapter.pause(adapter.gone)


def test_what_was_answered_before_it_went_may_have_been_done() -> None:
    adapter = Adapter()
    with pytest.raises(EngineUnknown, match="takes no connection; a call before that was answered"):
        adapter.pause(adapter.answered, adapter.gone)


def test_a_command_that_goes_well_is_left_alone() -> None:
    adapter = Adapter()
    assert adapter.pause(adapter.answered) == "paused"
    assert adapter.pause.__doc__ == "Raises what a step raises."
