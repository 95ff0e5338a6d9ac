"""What the commands of `moebus routes` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from moebus.cli._context import session
from moebus.consumers.reader import RoutingReader
from moebus.schemas.model_card import ModelCard

Run = Annotated[str | None, typer.Option("--run", help="The run (default: that of the settings).")]
Prefix = Annotated[str | None, typer.Argument(help="Only ids below it; `a:1` never covers `a:10`.")]


@contextmanager
def open_reader(ctx: typer.Context, run: str | None, card: ModelCard | None = None) -> Iterator[RoutingReader]:
    """A reader of the run, closed at the end."""
    with session(ctx) as s, RoutingReader(s.broker, s.topics, run=run or s.settings.run, card=card) as reader:
        yield reader


def size_text(count: float) -> str:
    """`1.5 GB`, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 1000 else f"{count / 1000:.3g} PB"
