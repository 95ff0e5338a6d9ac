"""Why a read of routes has no answer. `name` is the word in an HTTP body's `error`; `http` the status."""

from __future__ import annotations

from typing import ClassVar

from moebus.schemas.errors import FatalError, MoebusError, RetriableError


class RouteError(MoebusError):
    """Base of the errors of reading routes."""

    name: ClassVar[str] = "RouteError"
    http: ClassVar[int] = 500


class RouteNotYet(RouteError, RetriableError):
    """Nothing whole is there yet under this identity; it may still come."""

    name = "RouteNotYet"
    http = 404


class RouteNeverComing(RouteError, FatalError):
    """The attempt was lost (not completed in time) or its base is gone: it will never be whole."""

    name = "RouteNeverComing"
    http = 410


class RouteDeleted(RouteError, FatalError):
    """Removed by a delete, a clear, a later turn or its age."""

    name = "RouteDeleted"
    http = 410


class RouteCorrupt(RouteError, FatalError):
    """The attempt is spoilt: its records contradict each other, or what was stored cannot be read."""

    name = "RouteCorrupt"
    http = 422


class AmbiguousAttempt(RouteError, FatalError):
    """Several whole attempts and none was named (or one identity in two groups); the text lists them."""

    name = "AmbiguousAttempt"
    http = 409


class StoreCatchingUp(RouteError, RetriableError):
    """The store has not read its log to the end yet, or has not heard from Kafka lately; the text has its progress."""

    name = "StoreCatchingUp"
    http = 503


ROUTE_ERRORS: dict[str, type[RouteError]] = {
    cls.name: cls
    for cls in (RouteNotYet, RouteNeverComing, RouteDeleted, RouteCorrupt, AmbiguousAttempt, StoreCatchingUp)
}


def route_error(name: str, detail: str) -> RouteError:
    """The error of an HTTP body `{"error": name, "detail": detail}`; RouteError for an unknown name."""
    return ROUTE_ERRORS.get(name, RouteError)(detail)
