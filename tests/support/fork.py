"""Forking a process that has threads, as users do: Python 3.12 and later warn of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable


def in_a_fork(work: Callable[[], int]) -> int:
    """Process id of a fork that ends with what `work` returns (99 where it raises); nothing of pytest runs in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        except BaseException:
            os._exit(99)
    return pid


def exit_code(pid: int) -> int:
    """Waits for a fork to end."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
