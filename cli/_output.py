"""What commands print: results on stdout (as text or JSON), everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from moebus.schemas.errors import MoebusError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON: one object, or one object a line.")]

_PIPE_WIDTH = 160  # a pipe has no width of its own, and ids must not be cut there

out = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPE_WIDTH)


def emit(value: object, *, as_json: bool, text: str | None = None) -> None:
    """Prints one result: `value` as one line of JSON, or `text` for people."""
    if as_json:
        sys.stdout.write(json.dumps(value, default=str, ensure_ascii=False) + "\n")
        sys.stdout.flush()
    elif text is not None:
        out.print(text, markup=False, soft_wrap=True)


def fail(exc: MoebusError) -> int:
    """Says what went wrong in one sentence on stderr; returns the exit code."""
    err.print(f"moebus: {exc}", markup=False, soft_wrap=True)
    return exc.exit_code
