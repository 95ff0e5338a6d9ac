"""What stands between a reader and the stores."""

from __future__ import annotations

from moebus.schemas.errors import RetriableError
from moebus.schemas.route_errors import RouteError


class StoreUnreachable(RouteError, RetriableError):
    """No live store answers for the partition asked for; the text names those that were tried."""

    name = "StoreUnreachable"
    http = 503
