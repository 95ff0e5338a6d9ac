"""`moebus dlt`: look at records that nobody could use, and send them again."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from moebus.cli._context import Session, session
from moebus.cli._output import JsonFlag, emit, err, out
from moebus.consumers.dlt import (
    DeadLetter,
    ReplayRefused,
    check_replay,
    dead_letters,
    find_letter,
    parse_position,
    replay,
)
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record.describe import describe

app = typer.Typer(
    no_args_is_help=True,
    help="Dead letters: records that were put aside, with the reason.\n\nEach is named by the place of its original, "
    "`topic/partition/offset`.\n\nExit codes: 0 done, 1 failed, 2 wrong use or refused, 3 only some sent, 5 no broker.",
)
Topic = Annotated[str | None, typer.Option(help="Only of this topic (its full name or a part of it).")]
Reason = Annotated[str | None, typer.Option(help="Only with this reason.")]
_SHOWN = 256


@app.command("ls")
def ls_command(
    ctx: typer.Context,
    topic: Topic = None,
    reason: Reason = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest ones, at most.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List the dead letters, oldest first. With `--json` one object a line.

    Example: `moebus dlt ls --reason checksum`
    """
    with session(ctx) as s:
        found = _chosen(dead_letters(s.broker, s.topics), topic, reason)
    table = Table("original", "reason", "bytes", "put aside (UTC)", "by", "detail")
    for letter in found[-limit:]:
        emit(letter.as_dict(), as_json=as_json)
        size = str(letter.truncated or len(letter.value))
        table.add_row(letter.position, letter.reason, size, _time(letter.at_ms), letter.writer, letter.detail)
    if as_json:
        return
    out.print(table if found else "no dead letters")
    if len(found) > limit:
        out.print(f"{len(found) - limit} older ones are not shown: --limit {len(found)}")


@app.command("show")
def show_command(
    ctx: typer.Context,
    position: Annotated[str, typer.Argument(help="`topic/partition/offset` of the original.")],
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the original bytes to this file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show one dead letter: why it was put aside, and what can be read of it.

    Example: `moebus dlt show moebus.routes.v1/3/1042 --out record.bin`
    """
    parse_position(position)
    with session(ctx) as s:
        letter = find_letter(dead_letters(s.broker, s.topics), position)
        nature = letter.nature(s.topics)
    if out_file is not None:
        out_file.write_bytes(letter.value)
    fields = {**letter.as_dict(), "nature": nature, "content": _content(letter, nature)}
    if as_json:
        emit(fields, as_json=True)
        return
    table = Table(show_header=False)
    for name, value in fields.items():
        table.add_row(name, json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value))
    out.print(table, markup=False)


@app.command("replay")
def replay_command(
    ctx: typer.Context,
    positions: Annotated[list[str] | None, typer.Argument(help="Originals, `topic/partition/offset` each.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that --topic and --reason leave.")] = False,
    topic: Topic = None,
    reason: Reason = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Commands, DELETE and CLEAR too: they take effect.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each acknowledgement.")] = 30.0,
    as_json: JsonFlag = False,
) -> None:
    """Send the original bytes to the partition they came from once more, under their key.

    For records that can be used now, after whoever refused them was repaired. Commands, DELETE and CLEAR are refused
    without `--force`: they take effect now, in another state than that they were meant for. One that was kept in part
    is never sent. With `--json` one object a line.

    Example: `moebus dlt replay --all --topic routes.v1 --reason version --dry-run`
    """
    if bool(positions) == everything:
        raise InvalidInput("POSITION", "name dead letters, or give --all")
    for position in positions or []:
        parse_position(position)
    with session(ctx) as s:
        letters = dead_letters(s.broker, s.topics)
        chosen = _chosen(letters, topic, reason) if everything else [find_letter(letters, p) for p in positions or []]
        outcomes = [_send(s, letter, dry_run, force, timeout, as_json) for letter in chosen]
    if not as_json:
        said = "would be sent" if dry_run else "sent"
        out.print(f"{sum(outcomes)} of {len(outcomes)} {said}")
    if not all(outcomes):
        raise typer.Exit(3 if any(outcomes) else ReplayRefused.exit_code)


def _send(s: Session, letter: DeadLetter, dry_run: bool, force: bool, timeout: float, as_json: bool) -> bool:
    """False: refused."""
    fields: dict[str, object] = {"position": letter.position, "reason": letter.reason}
    try:
        check_replay(letter, s.topics, force=force)
    except ReplayRefused as refused:
        emit({**fields, "outcome": "refused", "detail": str(refused)}, as_json=as_json)
        if not as_json:
            err.print(f"moebus: {refused}", markup=False, soft_wrap=True)
        return False
    if dry_run:
        emit({**fields, "outcome": "would_send"}, as_json=as_json, text=f"would send {letter.position}")
        return True
    at = replay(s.broker, letter, timeout=timeout)
    place = f"{at.topic}/{at.partition}/{at.offset}"
    emit({**fields, "outcome": "sent", "sent_to": place}, as_json=as_json, text=f"{letter.position} -> {place}")
    return True


def _chosen(letters: list[DeadLetter], topic: str | None, reason: str | None) -> list[DeadLetter]:
    return [
        letter
        for letter in letters
        if (topic is None or topic in letter.topic) and (reason is None or reason == letter.reason)
    ]


def _content(letter: DeadLetter, nature: str) -> object:
    """What can be read of the bytes: a route record in words, JSON as it is, else the first bytes in hex."""
    if nature in ("route", "fence"):
        return describe(letter.value)
    try:
        return json.loads(letter.value)
    except ValueError:
        return letter.value[:_SHOWN].hex()


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
