"""Errors of the controller's side."""

from __future__ import annotations

from typing import Any, ClassVar

from moebus.producers.control.outcome import EXIT_CODES, Outcome
from moebus.schemas.errors import FatalError, MoebusError


class FleetError(MoebusError):
    """A command did not end well on every worker it was for; `outcome` says where and why."""

    exit_code: ClassVar[int] = EXIT_CODES["failed"]

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.sentence())
        self.outcome = outcome

    @property
    def http_status(self) -> int:
        return self.outcome.http_status

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.outcome,))


class FleetPartial(FleetError):
    """Every expected worker answered, and only some of them well."""

    exit_code = EXIT_CODES["partial"]


class FleetTimeout(FleetError):
    """Somebody has not answered in time; what it did is unknown."""

    exit_code = EXIT_CODES["timeout"]


class UnknownOperation(FatalError):
    """The command log holds no command of this id."""


def fleet_error(outcome: Outcome) -> FleetError:
    """The error of an outcome that is not ok, with the exit code of its status."""
    kinds: dict[str, type[FleetError]] = {"partial": FleetPartial, "timeout": FleetTimeout}
    return kinds.get(outcome.status, FleetError)(outcome)
