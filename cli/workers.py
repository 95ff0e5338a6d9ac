"""`moebus workers`: the fleet as the members topic shows it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from moebus.cli._context import session
from moebus.cli._operation import human_bytes
from moebus.cli._output import JsonFlag, emit, err, out
from moebus.cli._table import Cell, print_rows
from moebus.producers.control import ControlClient, MemberView
from moebus.schemas.errors import FatalError
from moebus.schemas.responses import Weights


def command(
    ctx: typer.Context,
    worker_id: Annotated[str | None, typer.Argument(help="Only this worker, with all it says of itself.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the workers: who is live, in which state, holding what.

    Example: `moebus workers worker-1 --json`
    """
    with session(ctx) as s, ControlClient(s.broker, s.topics) as client:
        known = client.workers()
    workers = [view for view in known if worker_id in (None, view.member_id)]
    if worker_id is not None and not workers:
        names = ", ".join(view.member_id for view in known)
        raise FatalError(f"no worker {worker_id} is known; known are {names or 'none'}")
    for view in workers:
        emit(view.as_dict(), as_json=as_json)
    if as_json:
        return
    if worker_id is not None:
        _print_one(workers[0])
    elif workers:
        _print_all(workers)
    else:
        err.print(
            "no worker has announced itself under this topic prefix; start one with `moebus worker`", markup=False
        )


def _print_all(workers: list[MemberView]) -> None:
    names = ("worker", "live", "ready", "state", "memory", "version", "run", "doing", "reason")
    print_rows(out, names, [_row(view) for view in workers], head=4)


def _row(view: MemberView) -> tuple[Cell, ...]:
    member, state = view.state, view.state.state
    memory = "" if state is None else ", ".join(_memory(view, str(tag), str(r)) for tag, r in state.tags.items())
    if state is not None and state.weights is Weights.EMPTY:
        memory += " (weights empty)"
    return (
        view.member_id,
        Text("live", style="green") if view.live else Text("gone", style="red"),
        "ready" if member.ready else "not ready",
        "" if state is None else str(state.lifecycle),
        memory,
        "" if state is None else state.version or "unknown",
        member.run or "",
        "" if member.operation is None else f"{member.operation.method} {member.operation.step}".rstrip(),
        member.reason or "",
    )


def _memory(view: MemberView, tag: str, residency: str) -> str:
    sizes = {str(name): size for name, size in view.state.bytes.items()}
    return f"{tag} {human_bytes(sizes[tag])}" if residency == "resident" and tag in sizes else f"{tag} {residency}"


def _print_one(view: MemberView) -> None:
    rows: list[tuple[str, str]] = [(name, str(value)) for name, value in view.as_dict().items() if name != "ops"]
    ops = view.ops.ops if view.ops is not None else ()
    rows += [(f"operation at offset {op.offset}", f"{op.method} {op.code} ({op.request_id})") for op in ops]
    print_rows(out, ("field", "value"), rows)
