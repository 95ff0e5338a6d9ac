"""Notices a group member that does not get through a rebalance."""

from __future__ import annotations

MIN_SECONDS = 30.0


class JoinWatch:
    """Says once that joining has taken too long: the member's consumer is then replaced, as a restart would do.

    A rebalance waits for every member; one whose JoinGroup or SyncGroup got lost can hold up all of them until
    the broker's rebalance timeout of minutes.
    """

    def __init__(self, session_timeout: float) -> None:
        """Three session timeouts, 30 s at least: by then the broker has thrown out whoever is really gone."""
        self._limit = max(MIN_SECONDS, 3 * session_timeout)
        self._since: float | None = None

    def overdue(self, joined: bool, now: float) -> bool:
        """To be asked after every poll. `now`: seconds of a clock that never goes back."""
        if joined:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since < self._limit:
            return False
        self._since = now
        return True
