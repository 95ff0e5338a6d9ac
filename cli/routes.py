"""`moebus routes`: look at the routes that the stores hold and at the log, check, export, plan and delete."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from moebus.broker.errors import BrokerUnavailable
from moebus.cli._context import session, settings_of
from moebus.cli._output import JsonFlag, emit, out
from moebus.cli._routes import Prefix, Run, open_reader
from moebus.cli._routes_check import export_command, verify_command
from moebus.cli._routes_log import stats_command, tail_command
from moebus.cli._routes_plan import plan_command
from moebus.consumers.reader import Rollout
from moebus.producers.routing import RoutingPublisher
from moebus.schemas.errors import InvalidInput
from moebus.schemas.rollout import check_prefix, rollout_key

app = typer.Typer(
    no_args_is_help=True,
    help="Read, list, check, export and delete routes; follow their log; plan a run.\n\n"
    "Stores are found in the members topic; a rollout is named by run, rollout id and choice.\n\n"
    "Exit codes: 0 done, 1 not there (deleted, not yet, never, spoilt), 2 wrong use, 5 no broker.",
)
app.command("tail")(tail_command)
app.command("stats")(stats_command)
app.command("verify")(verify_command)
app.command("export")(export_command)
app.command("plan")(plan_command)


@app.command("get")
def get_command(
    ctx: typer.Context,
    rollout_id: Annotated[str, typer.Argument(help="For example `gsm8k-17:3:0:0`.")],
    run: Run = None,
    choice: Annotated[int, typer.Option(help="Index of the sample in its request.")] = 0,
    attempt: Annotated[str | None, typer.Option(help="Which attempt, where there are several.")] = None,
    layers: Annotated[str | None, typer.Option(help="Only these layers, by global number: `3,4,5`.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for it.")] = 0.0,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the array to this .npy file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what is known of one rollout, and how its tokens were spread over the experts.

    `--out` writes the expert ids as an array [rows, layers, top_k].

    Example: `moebus routes get gsm8k-17:3:0:0 --run exp-7 --out routes.npy`
    """
    wanted = _layers(layers)
    rollout_key(run or "run", rollout_id, choice)
    with open_reader(ctx, run) as reader:
        found = reader.get(rollout_id, choice, attempt, wait=wait, layers=wanted)
    if out_file is not None:
        with out_file.open("wb") as file:
            np.save(file, found.routes, allow_pickle=False)
    summary = _summary(found) | ({"file": str(out_file)} if out_file else {})
    if as_json:
        emit(summary, as_json=True)
        return
    table = Table(show_header=False)
    for name, value in summary.items():
        table.add_row(name, str(value))
    out.print(table)
    out.print(_spread(found))


@app.command("ls")
def ls_command(
    ctx: typer.Context,
    prefix: Prefix = None,
    run: Run = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most rollouts to list.")] = 100,
    after: Annotated[str | None, typer.Option(help="The cursor that the page before ended with.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the rollouts of a run that the stores hold.

    With `--json` one object a line; where more follow, the last line is `{"after": CURSOR}`.

    Example: `moebus routes ls gsm8k-17 --run exp-7 --limit 20`
    """
    if prefix is not None:
        check_prefix(prefix)
    with open_reader(ctx, run) as reader:
        page = reader.page(prefix, limit=limit, after=after)
    table = Table("rollout", "choice", "attempt", "rows", "status", "epoch", "stored at (UTC)")
    for one in page.rollouts:
        emit(one.as_dict(), as_json=as_json)
        when = datetime.fromtimestamp(one.at_ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        ref = one.ref
        table.add_row(ref.rollout_id, str(ref.choice), ref.attempt, str(ref.rows), one.status, str(one.epoch), when)
    if as_json:
        if page.after:
            emit({"after": page.after}, as_json=True)
        return
    out.print(table if page.rollouts else "no rollouts")
    if page.after:
        out.print(f"more follow: --after {page.after}", markup=False, soft_wrap=True)


@app.command("rm")
def rm_command(
    ctx: typer.Context,
    prefix: Annotated[str, typer.Argument(help="`a:1` removes `a:1` and `a:1:...`, never `a:10`.")],
    run: Run = None,
    epoch: Annotated[int, typer.Option(min=0, help="Remove this epoch and earlier ones, and refuse late ones.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for every partition to acknowledge.")] = 30.0,
    as_json: JsonFlag = False,
) -> None:
    """Delete every rollout below a prefix, in all stores, for good within its epoch.

    Asks first on a terminal; elsewhere it needs `--yes`. Repeating it is harmless.

    Example: `moebus routes rm gsm8k-17:3 --run exp-7 --yes`
    """
    check_prefix(prefix)
    name = run or settings_of(ctx).run
    if not yes and not _confirmed(f"Delete every rollout of run {name} below {prefix!r}, epoch <= {epoch}?"):
        raise typer.Exit(1)
    with session(ctx) as s, RoutingPublisher(s.broker, s.topics, run=name, card=None, epoch=epoch) as publisher:
        receipt = publisher.delete(prefix)
        try:
            stored = receipt.result(timeout)
        except TimeoutError:
            text = "not acknowledged by every partition yet; it may still happen: repeat it"
            raise BrokerUnavailable(f"{receipt.name}: {text}") from None
    offsets = {str(number): position.offset for number, position in sorted(stored.positions.items())}
    emit(
        {"id": stored.fence_id, "run": name, "prefix": prefix, "epoch": epoch, "offsets": offsets},
        as_json=as_json,
        text=f"deleted {name}/{prefix} (epoch <= {epoch}): in all {len(offsets)} partitions, id {stored.fence_id}",
    )


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise InvalidInput("--yes", "needed where nobody can be asked")
    return typer.confirm(question, err=True)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidInput("--layers", f"{text[:40]!r} is not a list of layer numbers like 3,4,5")
    return tuple(map(int, parts))


def _summary(found: Rollout) -> dict[str, object]:
    ref = found.ref
    return {
        **ref.to_dict(),
        "group": ref.effective_group,
        "status": found.status,
        "finish_reason": found.finish_reason,
        "epoch": found.epoch,
        "shape": list(found.routes.shape),
        "dtype": found.routes.dtype.name,
        "layers": list(found.layers),
        "top_k": found.top_k,
        "num_experts": found.num_experts,
        "versions": None if found.versions is None else [list(entry) for entry in found.versions],
        "bytes": found.routes.nbytes,
    }


def _spread(found: Rollout) -> Table:
    """Per layer: how many experts were used, and the most loaded of them."""
    table = Table("layer", "experts used", "most loaded", "its share")
    for index, layer in enumerate(found.layers):
        loads = np.bincount(found.routes[:, index].ravel(), minlength=found.num_experts)
        if loads.sum():
            top = int(loads.argmax())
            share = f"{loads[top] / loads.sum():.1%}"
            table.add_row(str(layer), f"{int((loads > 0).sum())} of {found.num_experts}", str(top), share)
    return table
