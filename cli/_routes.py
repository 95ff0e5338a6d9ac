"""What the commands of `moebus routes` share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from moebus.cli._context import session
from moebus.consumers.reader import RoutingReader
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard

Run = Annotated[str | None, typer.Option("--run", help="The run (default: that of the settings).")]
Prefix = Annotated[str | None, typer.Argument(help="Only ids below it; `a:1` never covers `a:10`.")]


@contextmanager
def open_reader(ctx: typer.Context, run: str | None, card: ModelCard | None = None) -> Iterator[RoutingReader]:
    """A reader of the run, closed at the end."""
    with session(ctx) as s, RoutingReader(s.broker, s.topics, run=run or s.settings.run, card=card) as reader:
        yield reader


def read_card(model: Path) -> ModelCard:
    """The card of a model's `config.json` (a file, or the folder that has it), or of a file with a ModelCard.

    Raises:
        InvalidInput: field `--model`, or what the file does not say.
    """
    path = model / "config.json" if model.is_dir() else model
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput("--model", f"{path} cannot be read: {error.strerror}") from None
    try:
        config = json.loads(text)
    except ValueError:
        raise InvalidInput("--model", f"{path} is not JSON") from None
    if not isinstance(config, dict):
        raise InvalidInput("--model", f"{path} is not a JSON object")
    if "moe_layers" in config:
        return ModelCard.from_dict(config)
    return ModelCard.from_hf_config(config, name=path.parent.name or None)


def size_text(count: float) -> str:
    """`1.5 GB`, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 1000 else f"{count / 1000:.3g} PB"
