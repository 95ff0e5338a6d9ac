"""Ends this process when the one that started it dies, however it dies (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL when the parent's thread ends; at once if it is gone already.

    Not SIGTERM: what the parent used to provide (a broker, a disk) is gone too, and draining would wait for it.

    Linux only; elsewhere it does nothing. Call it from the main thread before other threads start.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    # Between fork and prctl the parent may have died already: then nobody will signal.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
