"""`moebus demo`: the main job end to end on real parts."""

from __future__ import annotations

import secrets
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from moebus.cli._context import broker_named, settings_of
from moebus.cli._output import err, out
from moebus.cli.demo.stage import Stage, fresh_directory, how_to_look, take_down


def command(
    ctx: typer.Context,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running at the end, and say how to look.")
    ] = False,
    down: Annotated[bool, typer.Option("--down", help="Only end what an earlier `--keep` left running.")] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Where data and logs go.")] = Path(".run/demo"),
) -> None:
    """Run the main job end to end: a Kafka, two workers with Paddle engines, a store, a trainer.

    Takes about a minute once everything is installed. Uses the broker of `--bootstrap-servers` (or
    MOEBUS_KAFKA__BOOTSTRAP_SERVERS) if one is given, else starts a real Apache Kafka on loopback.

    Example: `moebus demo --keep`, then `moebus demo --down`
    """
    settings = settings_of(ctx)
    directory = directory.absolute()
    if down:
        ended = take_down(directory)
        out.print(f"ended: {', '.join(ended)}" if ended else "nothing was running")
        return
    interrupted = _on_signals()
    started = time.monotonic()
    stage = Stage(
        fresh_directory(directory),
        settings,
        f"demo-{secrets.token_hex(2)}",
        keep=keep,
        own_kafka=not broker_named(ctx, settings),
        interrupted=interrupted,
    )
    try:
        from moebus.cli.demo.story import Story  # brings Paddle's package: `moebus --help` must not wait for it

        Story(stage).tell()
        stage.check()
    except BaseException as exc:
        stage.keep = False
        if interrupted:
            err.print("interrupted: ending everything that was started")
        stage.close()
        if interrupted:  # whatever was raised: what is interrupted may raise an error of its own on its way out
            raise typer.Exit(130) from exc
        raise
    stage.close()
    out.print(f"\n[bold]Done[/bold] in {time.monotonic() - started:.0f} s.")
    if keep:
        how_to_look(stage)


def _on_signals() -> list[int]:
    """SIGINT and SIGTERM interrupt what runs, later ones do not disturb the end; the list holds those that came."""
    came: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    return came
