"""What commands print: results on stdout (as text or JSON), everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from moebus.schemas.errors import MoebusError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON: one object, or one object a line.")]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


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
