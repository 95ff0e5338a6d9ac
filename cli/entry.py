"""Entry point of the console script: whatever stops a command early stops it without a traceback."""

from __future__ import annotations

import errno
import os
import sys

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
_OUTPUT_FAULTS = frozenset({errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EDQUOT})


def run() -> None:
    """Runs the command line and ends the process."""
    try:
        from moebus.cli.main import app  # imported here: Ctrl-C during the imports ends quietly too

        app(prog_name="moebus")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as exc:
        # Files and sockets have errors of their own by now; what is left without a name is stdout.
        if exc.filename is not None or exc.errno not in _OUTPUT_FAULTS:
            raise
        sys.stderr.write(f"moebus: cannot write the output ({exc.strerror})\n")
        sys.stderr.flush()
        os._exit(1)  # an orderly exit would try to write the rest once more
