"""The one error hierarchy. Every error that moebus raises on purpose is a `MoebusError`.

`RetriableError`: the same call may succeed later, nothing has to be changed first.
`FatalError`: the same call fails again until somebody changes the input, the settings or the data.
`exit_code` is what a command ends with (design section 6).
"""

from __future__ import annotations

from typing import ClassVar


class MoebusError(Exception):
    """Base class of all errors of this library; the text is one sentence a user can act on."""

    exit_code: ClassVar[int] = 1


class RetriableError(MoebusError):
    """The same call may succeed later."""


class FatalError(MoebusError):
    """The same call fails again until something is changed."""


class InvalidInput(FatalError, ValueError):
    """A value from outside is not acceptable. `field` names it; the text says why."""

    exit_code = 2

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[str, str]]:
        return (type(self), (self.field, self.reason))


class BadRecord(FatalError):
    """A record of the log cannot be decoded. `reason` is a short, stable word for metrics and dead letters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[BadRecord], tuple[str, str]]:
        return (type(self), (self.reason, self.detail))


class SettingsError(FatalError):
    """A setting is unknown, malformed or unsafe; the text names it."""

    exit_code = 2
