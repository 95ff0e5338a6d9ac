"""`moebus store`: the route store."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from moebus.cli._context import settings_of
from moebus.cli._service import Service, with_http
from moebus.observability.parent import exit_with_parent
from moebus.observability.settings import Settings
from moebus.schemas.errors import InvalidInput
from moebus.schemas.rollout import check_run
from moebus.schemas.target import check_worker_id


def command(
    ctx: typer.Context,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Where the data lies (default: the settings').")
    ] = None,
    store_id: Annotated[
        str | None, typer.Option("--store-id", help="Unique in the fleet (default: `store-` and the host's name).")
    ] = None,
    partitions: Annotated[
        str | None, typer.Option("--partitions", help="`0-3,7`; default all. Several stores may follow the same ones.")
    ] = None,
    http_host: Annotated[
        str | None, typer.Option("--http-host", help="Address of the page (default 127.0.0.1).")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option("--http-port", min=0, max=65535, help="0: a free one, announced in members.")
    ] = None,
    blobs: Annotated[
        str | None,
        typer.Option("--blobs", help="Where the bytes lie: `lmdb` (default), `file:///path`, `s3://bucket/prefix`."),
    ] = None,
    blobs_endpoint: Annotated[
        str | None, typer.Option("--blobs-endpoint", help="URL of an S3 API that is not Amazon's.")
    ] = None,
    mirrors: Annotated[
        list[str] | None,
        typer.Option("--mirror", help="Copies, repeatable: `folder:/path`, `p2pstore:redis://h:port`."),
    ] = None,
    quotas: Annotated[
        list[str] | None,
        typer.Option("--quota", help="`RUN=BYTES`, repeatable: what a run may hold in all; `*`: every other run."),
    ] = None,
    cards: Annotated[
        list[str] | None,
        typer.Option(
            "--card", help="`RUN=config.json`, repeatable: the model of a run (default: its first rollout's)."
        ),
    ] = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a route store until SIGTERM: follows the routes topic, persists in LMDB, serves reads over HTTP.

    Starting again goes on where it was; the same data is never taken in twice. Without a broker it waits.

    Example: `moebus store --data-dir /var/lib/moebus --partitions 0-3`

    The index always lies in LMDB. Credentials of S3 come from the environment (AWS_ACCESS_KEY_ID and the like).
    """
    if parent_pid is not None:
        exit_with_parent(parent_pid)
    settings = with_http(settings_of(ctx, service=True), http_host, http_port)
    limits = settings.store.quotas | {run: _size(run, text) for run, text in _pairs("quota", quotas)}
    models = settings.store.cards | {check_run(run): Path(text) for run, text in _pairs("card", cards)}
    copies = tuple(mirrors) if mirrors else None
    settings = _with_store(
        settings, blobs=blobs, blobs_endpoint=blobs_endpoint, mirrors=copies, quotas=limits, cards=models
    )
    member = check_worker_id(store_id or default_id(), "store_id")
    # LMDB and Starlette are imported here: `moebus --help` must not wait for them.
    from moebus.cli._store import StoreService

    followed = read_partitions(partitions)
    service = Service("store", settings)
    work = StoreService(service, data_dir or settings.store.data_dir, member, followed)
    raise typer.Exit(service.run(work.make, work.routes()))


def _pairs(option: str, given: list[str] | None) -> Iterator[tuple[str, str]]:
    """`RUN=VALUE` as (run, value). Raises InvalidInput naming the option, also where a run is there twice."""
    seen = set()
    for text in given or ():
        run, equals, value = text.partition("=")
        if not equals or not value:
            raise InvalidInput(option, f"{text!r} is not of the form RUN=...")
        if run in seen:
            raise InvalidInput(option, f"{run!r} is given twice")
        seen.add(run)
        yield run, value


def _size(run: str, text: str) -> int:
    if run != "*":
        check_run(run)
    if not re.fullmatch(r"[1-9][0-9]{0,17}", text):
        raise InvalidInput("quota", f"{text!r} is not a number of bytes, 1 or more")
    return int(text)


def _with_store(settings: Settings, **given: object) -> Settings:
    """Settings with what the command line says of the store over them."""
    over = {name: value for name, value in given.items() if value is not None}
    return settings.model_copy(update={"store": settings.store.model_copy(update=over)})


def default_id() -> str:
    """`store-HOST`, with what an id may not hold left out."""
    return ("store-" + re.sub(r"[^A-Za-z0-9._-]", "", socket.gethostname()))[:64]


def read_partitions(text: str | None) -> tuple[int, ...] | None:
    """`0-3,7` -> (0, 1, 2, 3, 7); None means all. Raises InvalidInput, field `partitions`."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InvalidInput("partitions", f"{part!r} is neither a number nor a range like 0-3")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))
