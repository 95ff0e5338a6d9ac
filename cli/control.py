"""`moebus control`: command a fleet of inference engines, and look at what became of commands."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from moebus.cli._context import session
from moebus.cli._operation import add_command, print_outcome
from moebus.cli._output import JsonFlag, emit, out
from moebus.cli._table import print_rows
from moebus.producers.control import ControlClient, HistoryEntry, Trace, TraceEvent
from moebus.schemas.control_args import CacheMode, Level, Method, PauseMode, WakeWeights

app = typer.Typer(
    no_args_is_help=True,
    help="Command the workers of a fleet through the log; every worker answers.\n\n"
    "Exit codes: 0 done everywhere, 1 failed or nobody matched, 2 wrong use, 3 partial, 4 somebody did not answer, "
    "5 no broker.",
)
Tags = Annotated[str | None, typer.Option(help="`weight`, `kv_cache` or both, separated by a comma (default both).")]
Mode = Annotated[PauseMode, typer.Option(help="What happens to running requests.")]
Args = Mapping[str, Any]


@add_command(app, "pause", Method.PAUSE)
def pause(mode: Mode = "abort") -> Args:
    """Close admission and drain: requests end as they are (abort), finish (wait) or are frozen (keep).

    Example: `moebus control pause --mode wait --target role=rollout`
    """
    return {"mode": mode}


@add_command(app, "resume", Method.RESUME)
def resume() -> None:
    """Open admission again; needs all memory resident and the weights valid.

    Example: `moebus control resume --target worker-1`
    """


@add_command(app, "sleep", Method.SLEEP)
def sleep(
    tags: Tags = None,
    level: Annotated[Level, typer.Option(help="Keep a copy of the weights on the host, or none.")] = "offload",
    mode: Mode = "abort",
) -> Args:
    """Free device memory by tag; a running engine is paused first.

    Example: `moebus control sleep --tags kv_cache`
    """
    return {**_given(tags=tags), "level": level, "mode": mode}


@add_command(app, "wakeup", Method.WAKEUP)
def wakeup(
    tags: Tags = None,
    weights: Annotated[
        WakeWeights, typer.Option(help="Fill the weights again, or leave them for an update.")
    ] = "restore",
    resume: Annotated[bool, typer.Option("--resume", help="Open admission when everything is there.")] = False,
) -> Args:
    """Take device memory again by tag.

    Example: `moebus control wakeup --tags weight,kv_cache --resume`
    """
    return {**_given(tags=tags), "weights": weights, "resume": resume}


@add_command(app, "update-weights", Method.UPDATE_WEIGHTS)
def update_weights(
    version: Annotated[str, typer.Option(help="Name of the new weights; newer means later in the log.")],
    source: Annotated[str | None, typer.Option(help="File, directory or URL (default: the engine's own).")] = None,
    digest: Annotated[str | None, typer.Option(help="Digest that the weights must have.")] = None,
    cache: Annotated[CacheMode, typer.Option(help="What becomes of the prefix cache.")] = "reset",
) -> Args:
    """Load new weights on every target or on none: all stage them, then the update is committed or given up.

    Needs paused engines with their weights resident.

    Example: `moebus control update-weights --version step-812 --source file:///ckpt/812.safetensors`
    """
    return {"version": version, **_given(source=source, digest=digest), "cache": cache}


@add_command(app, "reset-cache", Method.RESET_CACHE)
def reset_cache() -> None:
    """Drop the prefix caches.

    Example: `moebus control reset-cache`
    """


@add_command(app, "abort", Method.ABORT_REQUESTS)
def abort(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of the requests to end.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="End every request.")] = False,
) -> Args:
    """End generation requests with what they have.

    Example: `moebus control abort gsm8k-17:3:0:0#1`
    """
    return {**_given(ids=ids or None), **({"all": True} if everything else {})}


@add_command(app, "status", Method.STATUS)
def status() -> None:
    """Ask every worker what it holds. `moebus workers` shows the same without asking.

    Example: `moebus control status --json`
    """


@add_command(app, "begin-run", Method.BEGIN_RUN)
def begin_run(name: Annotated[str, typer.Argument(help="Name of the run: 1 to 64 of A-Z a-z 0-9 . _ -")]) -> Args:
    """Begin a run: engines paused and awake, weights as they are; commands of other runs are refused from now on.

    Example: `moebus control begin-run exp-7`
    """
    return {"run": name}


@app.command()
def show(
    ctx: typer.Context, request_id: Annotated[str, typer.Argument(help="As printed.")], as_json: JsonFlag = False
) -> None:
    """Print the life of one command: every record about it, across topics and processes, and its outcome.

    Example: `moebus control show control-4f0c...`
    """
    with session(ctx) as s, ControlClient(s.broker, s.topics) as client:
        trace = client.trace(request_id)
    emit(trace.as_dict(), as_json=as_json)
    if not as_json:
        print_trace(trace)


def print_trace(trace: Trace) -> None:
    """A row for each record about the command, then its outcome."""
    rows = [(time_text(e.time_ms), e.actor, _what(e), e.where, e.detail) for e in trace.events]
    print_rows(out, ("time (broker)", "who", "what", "where", "detail"), rows, head=3)
    if trace.outcome is not None:
        print_outcome(trace.outcome, so_far=True)


@app.command("history")
def history_command(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="How many of the last commands.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Print the last commands and what became of them, oldest first.

    Example: `moebus control history --limit 50 --json`
    """
    with session(ctx) as s, ControlClient(s.broker, s.topics) as client:
        entries = client.history(limit)
    for entry in entries:
        emit(entry.as_dict(), as_json=as_json)
    if not as_json:
        names = ("time (broker)", "offset", "command", "target", "status", "request id", "by")
        print_rows(out, names, [_history_row(entry) for entry in entries], head=3)


def time_text(unix_ms: int) -> str:
    """Local time with milliseconds."""
    return datetime.fromtimestamp(unix_ms / 1000, timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _given(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _what(event: TraceEvent) -> str:
    return event.what if event.code is None else f"{event.what} {event.code}"


def _history_row(entry: HistoryEntry) -> tuple[str, ...]:
    shown = entry.as_dict()
    target = shown["target"] if isinstance(shown["target"], str) else ",".join(shown["target"])
    missing = f" ({', '.join(shown['missing'])})" if shown["missing"] else ""
    return (
        time_text(shown["appended_ms"]),
        str(shown["offset"]),
        shown["method"],
        target,
        f"{shown['status']}{missing}",
        shown["request_id"],
        shown["issuer"] or "",
    )
