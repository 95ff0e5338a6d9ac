"""Entry point of the console script: whatever stops a command early stops it without a traceback."""

from __future__ import annotations

import errno
import os
import sys

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
WRONG_USE = 2
_OUTPUT_FAULTS = frozenset({errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EDQUOT})
_EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "starlette": "cli",
    "uvicorn": "cli",
    "lmdb": "cli,store",
    "fastapi": "cli,gateway",
}
"""Packages that commands import, and the extras that bring them."""


def run() -> None:
    """Runs the command line and ends the process."""
    try:
        from moebus.cli.main import app  # imported here: Ctrl-C during the imports ends quietly too

        app(prog_name="moebus")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as exc:
        if exc.name not in _EXTRAS:
            raise
        sys.stderr.write(
            f"moebus: this command needs the package {exc.name}: pip install 'moebus[{_EXTRAS[exc.name]}]'\n"
        )
        sys.exit(WRONG_USE)
    except OSError as exc:
        # Files and sockets have errors of their own by now; what is left without a name is stdout.
        if exc.filename is not None or exc.errno not in _OUTPUT_FAULTS:
            raise
        sys.stderr.write(f"moebus: cannot write the output ({exc.strerror})\n")
        sys.stderr.flush()
        os._exit(1)  # an orderly exit would try to write the rest once more
