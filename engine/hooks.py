"""Where a test or a drill reaches into an engine: one callable, called at named points."""

from __future__ import annotations

from typing import Protocol

from moebus.engine.port import Deadline


class Hook(Protocol):
    """Called outside the engine's locks; may block (a delay) or raise (a fault).

    `point`: `step` (before each step of generation; `subject` is the request id, or blank where a step serves many),
    `write` (before each tensor of a commit; `subject` is its name) or the name of a method of the port (`subject`
    is its tag, version or mode).
    """

    def __call__(self, point: str, subject: str, deadline: Deadline | None) -> None: ...


def no_hook(point: str, subject: str, deadline: Deadline | None) -> None:
    """The hook that does nothing."""
