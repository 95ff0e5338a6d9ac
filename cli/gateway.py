"""`moebus gateway`: the control plane over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from moebus.cli._context import settings_of
from moebus.cli._service import Service, with_http
from moebus.observability.parent import exit_with_parent


def command(
    ctx: typer.Context,
    http_host: Annotated[
        str | None, typer.Option("--http-host", help="Address to listen on (default 127.0.0.1); others need a token.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option("--http-port", min=0, max=65535, help="0: a free one, printed at start.")
    ] = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve FastDeploy's control paths and those of the fleet over HTTP until SIGTERM.

    `POST /v1/pause`, `/v1/sleep?tags=kv_cache`, ... command the whole fleet and wait; `POST /v1/control` takes any
    command for any target and returns its id at once. The paths are described at `/openapi.json`.

    Callers present the bearer token of the setting `MOEBUS_GATEWAY__TOKEN` (or `[gateway] token` in the settings
    file), if there is one. `FD_ENABLE_V1_UPDATE_WEIGHTS=1` makes `/clear_load_weight` and `/update_model_weight` work
    over the log; without it they use shared memory, for the engines in `MOEBUS_GATEWAY__LEGACY_SUFFIXES`.

    Example: `moebus gateway --http-port 8180`
    """
    if parent_pid is not None:
        exit_with_parent(parent_pid)
    settings = with_http(settings_of(ctx, service=True), http_host, http_port)
    # FastAPI is imported here: `moebus --help` must not wait for it.
    from moebus.cli._gateway import GatewayService

    service = Service("gateway", settings)
    work = GatewayService(service)
    raise typer.Exit(service.run(work.make, work.routes()))
