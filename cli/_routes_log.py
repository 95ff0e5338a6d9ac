"""`moebus routes tail` and `stats`: the log itself, and what the stores have made of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Annotated, Any

import typer
from rich.table import Table

from moebus.cli._context import session
from moebus.cli._output import JsonFlag, emit, out
from moebus.cli._routes import Run, size_text
from moebus.consumers.reader import MembersDirectory
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.store_client import StoreClient
from moebus.consumers.tail import tail
from moebus.observability.clock import SystemClock
from moebus.schemas.rollout import check_run
from moebus.schemas.route_errors import RouteError


def tail_command(
    ctx: typer.Context,
    run: Run = None,
    every_run: Annotated[bool, typer.Option("--all-runs", help="Records of every run.")] = False,
    last: Annotated[int, typer.Option(min=0, help="Begin so many records before the end of each partition.")] = 0,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin at the start of the log.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many records.")] = None,
    idle: Annotated[
        float | None, typer.Option("--idle-timeout", min=0, help="End after so many seconds without a record.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Follow the routes topic, record by record, straight from Kafka; Ctrl-C ends it.

    Needs no store. Records that cannot be read are shown with the reason. With `--json` one object a line.

    Example: `moebus routes tail --run exp-7 --last 20`
    """
    with session(ctx) as s, contextlib.suppress(KeyboardInterrupt):
        wanted = check_run(run or s.settings.run)
        records: Iterator[dict[str, object]] = (
            one
            for one in tail(
                s.broker, s.topics.routes, begin="start" if from_start else "end", last=last, idle_timeout=idle
            )
            if every_run or one.get("run") in (wanted, None)
        )
        for one in itertools.islice(records, limit):
            emit(one, as_json=as_json, text=_line(one))


def stats_command(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Show what each store holds of each partition and of each run, and how far it has read.

    With `--json` one object a line, for each store and partition. Exit code 1 if a store does not answer.

    Example: `moebus routes stats`
    """
    failed = False
    table = Table("store", "partition", "rollouts", "used", "of", "applied", "behind", "last append (UTC)", "state")
    runs = Table("store", "run", "used", "not whole yet", "quota of each", "model card")
    client = StoreClient()
    with session(ctx) as s:
        directory = MembersDirectory(s.broker, s.topics.members, SystemClock())
        stores = directory.stores(10.0)
        for store in stores:
            try:
                rows = list(_rows(store.url, client.figures(store.url)))
            except RouteError as error:
                failed = True
                rows = [{"store": store.url, "error": error.name, "detail": str(error)}]
            for row in rows:
                emit(row, as_json=as_json)
                table.add_row(*_cells(row))
            for cells in _runs(rows):
                runs.add_row(*cells)
        directory.close()
    client.close()
    if not stores:
        raise StoreUnreachable("no live store is in the members topic; start one with `moebus store`")
    if not as_json:
        out.print(table)
        if runs.rows:
            out.print(runs)
    if failed:
        raise typer.Exit(1)


def _line(one: dict[str, object]) -> str:
    """What a person wants of a record, in one line."""
    when = _time(one["at_ms"])
    head = f"{one['position']}  {when}  {one['kind']}"
    if one["kind"] == "unreadable":
        return f"{head}  {one['reason']}: {one['detail']}"
    if one["kind"] in ("delete", "clear"):
        what = f"/{one['prefix']} epoch <= {one['epoch']}" if "prefix" in one else f" epoch <= {one['through_epoch']}"
        return f"{head}  {one['run']}{what}"
    name = f"{one['run']}/{one['rollout_id']}#{one['choice']} {one['attempt']}"
    if one["kind"] == "chunk":
        return f"{head}  {name}  #{one['index']} rows {one['start']} +{one['rows']}  {one['codec']} {one['bytes']} B"
    return f"{head}  {name}  {one['rows']} rows in {one['chunks']} chunks  {one['status']}"


def _rows(url: str, figures: dict[str, dict[str, object]]) -> Iterator[dict[str, object]]:
    for number, held in figures.items():
        yield {"store": url, "partition": int(number), **held}


def _runs(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """One line for each run of a store, its partitions added up."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for one in row.get("runs") or ():
            found.setdefault(one["run"], []).append(one)
    for run, parts in sorted(found.items()):
        used, unfinished = (size_text(float(sum(one[name] for one in parts))) for name in ("used_bytes", "open_bytes"))
        quotas = [one["quota_bytes"] for one in parts if one["quota_bytes"] is not None]
        cards = sorted({one["card"] for one in parts if one["card"]})
        quota = f"{size_text(float(quotas[0]))} a partition" if quotas else "-"
        yield [str(rows[0]["store"]), run, used, unfinished, quota, ", ".join(cards) or "-"]


def _cells(row: dict[str, object]) -> list[str]:
    if "error" in row:
        return [str(row["store"]), *["-"] * 7, f"{row['error']}: {row['detail']}"]
    used, whole = (size_text(float(str(row[name]))) for name in ("used_bytes", "map_bytes"))
    return [
        str(row["store"]), str(row["partition"]), str(row["rollouts"]), used, whole, str(row["applied"]),
        str(row["lag"]), _time(row["last_append_ms"]), f"stopped: {row['full']}" if row["full"] else "follows",
    ]  # fmt: skip


def _time(ms: object) -> str:
    if not isinstance(ms, int) or ms <= 0:
        return "-"
    return datetime.fromtimestamp(ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
