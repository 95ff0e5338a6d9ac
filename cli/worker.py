"""`moebus worker`: the control worker beside an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moebus.cli._context import settings_of
from moebus.cli._service import Service, with_http
from moebus.cli.engines import EngineKind, EngineOptions, check_options, connect_engine, make_engine
from moebus.observability.parent import exit_with_parent
from moebus.schemas.errors import InvalidInput
from moebus.schemas.target import check_labels, check_worker_id


def command(
    ctx: typer.Context,
    engine: Annotated[EngineKind, typer.Option("--engine", help="The engine that this worker drives.")],
    worker_id: Annotated[str, typer.Option("--worker-id", help="1 to 64 of `A-Z a-z 0-9 . _ -`, unique in the fleet.")],
    label: Annotated[list[str] | None, typer.Option("--label", help="`k=v`; targets select by it. Repeatable.")] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Run that the routes belong to (default: the settings').")
    ] = None,
    engine_url: Annotated[
        str | None,
        typer.Option("--engine-url", help="Of a server (fastdeploy, vllm, sglang): `http://127.0.0.1:8000`."),
    ] = None,
    engine_token_file: Annotated[
        Path | None, typer.Option("--engine-token-file", help="File with the bearer token that the server wants.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of random weights (default 0).")] = None,
    version: Annotated[
        str | None, typer.Option("--version", help="Name of the weights it starts with (default `initial`).")
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="safetensors file or folder to start from.")] = None,
    weight_root: Annotated[
        list[str] | None,
        typer.Option("--weight-root", help="Path or URL; weights are read only from below. Repeatable."),
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", help="JSON with fields of the engine's config.")
    ] = None,
    http_host: Annotated[
        str | None, typer.Option("--http-host", help="Address of the page (default 127.0.0.1).")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option("--http-port", min=0, max=65535, help="0: a free one, see `moebus workers`.")
    ] = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a control worker beside an engine until SIGTERM.

    It answers every command whose target matches and serves `/metrics`, `/healthz` and `/readyz`. Without a broker it
    waits and goes on by itself. Exit code 6: a later worker took over its id.

    Engines in this process (`simulated`, `paddle`) take prompts at `POST /v1/generate`.

    Servers (`fastdeploy`, `vllm`, `sglang`) are driven by their own HTTP API: run one worker beside each, with
    `--engine-url`. It waits for a server that is not up, `/readyz` red with the reason, and restores one that comes
    back. Which launch flags a server needs and what it cannot do: docs/engines.

    Example: `moebus worker --engine simulated --worker-id w1 --label role=rollout`

    Example: `moebus worker --engine vllm --engine-url http://127.0.0.1:8000 --worker-id v1 --weight-root /ckpt`
    """
    if parent_pid is not None:
        exit_with_parent(parent_pid)
    check_worker_id(worker_id)
    labels = read_labels(label or [])
    settings = with_http(settings_of(ctx, service=True), http_host, http_port)
    roots = tuple(weight_root or settings.worker.weight_roots)
    options = EngineOptions(
        engine, seed, version, weights, model_config, roots, url=engine_url, token_file=engine_token_file
    )
    check_options(options)
    # Starlette and the worker are imported here: `moebus --help` must not wait for them.
    from moebus.cli._worker import InProcess, Side, Sidecar, make_work

    service = Service(f"worker {worker_id}", settings)
    side: Side
    if engine.is_server:
        side = Sidecar(connect_engine(options))
    else:
        built, card = make_engine(options)
        side = InProcess(service, built, card, run or settings.run)
    code = service.run(make_work(service, side, worker_id, labels), side.routes())
    side.engine.close()
    if code:
        os._exit(code)  # an engine thread that hangs must not keep a fenced worker alive


def read_labels(given: list[str]) -> dict[str, str]:
    """`["k=v", ...]` -> {"k": "v"}. Raises InvalidInput, field `label`."""
    labels: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name in labels:
            raise InvalidInput("label", f"{text!r} is not k=v, or {name} is given twice")
        labels[name] = value
    check_labels(labels)
    return labels
