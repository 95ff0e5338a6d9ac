"""`moebus topics`: create the topics of a fleet and report where they differ from their definition."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from moebus.broker.topics import ensure
from moebus.cli._context import session
from moebus.cli._output import JsonFlag, emit, out

app = typer.Typer(no_args_is_help=True, help="Create and check the Kafka topics.")


@app.callback()
def root() -> None:
    """Keeps `ensure` a subcommand."""


@app.command("ensure")
def ensure_command(
    ctx: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be created.")] = False,
    partitions: Annotated[int, typer.Option(min=1, max=1000, help="Partitions of a new routes topic.")] = 8,
    as_json: JsonFlag = False,
) -> None:
    """Create the topics that are missing; report drift, change and delete nothing.

    Safe to run again at any time. Exit code 1 if a topic differs from its definition.

    Example: `moebus --topic-prefix exp7 topics ensure --dry-run`
    """
    with session(ctx) as s:
        admin = s.broker.admin()
        reports = ensure(admin, s.topics, dry_run=dry_run, routes_partitions=partitions)
    table = Table("topic", "result", "what differs")
    for report in reports:
        emit(report.as_dict(), as_json=as_json)
        table.add_row(report.name, report.status, "\n".join(report.drift))
    if not as_json:
        out.print(table)
    if any(report.status == "drift" for report in reports):
        raise typer.Exit(1)
