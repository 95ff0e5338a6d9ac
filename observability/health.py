"""Health of a process: named checks, each None when well or a sentence that says what is wrong.

`/healthz` answers 200 while the process's loops turn (restart it otherwise); `/readyz` while it can do its work now.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Check = Callable[[], "str | None"]


class Health:
    """Register checks before or after the server starts; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, Check] = {}
        self._ready: dict[str, Check] = {}

    def add_live(self, name: str, check: Check) -> None:
        with self._lock:
            self._live[name] = check

    def add_ready(self, name: str, check: Check) -> None:
        with self._lock:
            self._ready[name] = check

    def live(self) -> dict[str, str]:
        """Failed liveness checks, name -> sentence; empty when alive."""
        return self._run(self._live)

    def ready(self) -> dict[str, str]:
        """Failed checks of either kind; empty when ready."""
        return {**self._run(self._live), **self._run(self._ready)}

    def _run(self, checks: dict[str, Check]) -> dict[str, str]:
        with self._lock:
            items = list(checks.items())
        failed: dict[str, str] = {}
        for name, check in items:
            try:
                reason = check()
            except Exception as exc:  # a check that breaks is a failed check, not a broken page
                reason = f"the check itself failed: {exc}"
            if reason is not None:
                failed[name] = reason
        return failed
