"""`moebus routes plan`: how much a run's routes are, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from moebus.cli._output import JsonFlag, emit, out
from moebus.cli._routes import size_text
from moebus.producers.model_file import read_card
from moebus.schemas.model_card import ModelCard
from moebus.schemas.sizing import Deployment, Rates, RoutePlan, plan_routes

_RATES = Rates()


def plan_command(
    model: Annotated[Path, typer.Option(help="`config.json` of the model (or its folder), or a ModelCard as JSON.")],
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts a step: prompts x samples.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a rollout, prompt included (the mean).")],
    step_seconds: Annotated[float, typer.Option(min=0.001, help="Seconds from one step to the next.")] = 300.0,
    publishers: Annotated[int, typer.Option(min=1, help="Engines that publish at the same time.")] = 8,
    stores: Annotated[int, typer.Option(min=1, help="Stores that share the partitions.")] = 1,
    replication: Annotated[int, typer.Option(min=1, help="Copies of the log (3 where there are three brokers).")] = 3,
    publish_rate: Annotated[float, typer.Option(min=0.001, help="MB/s of a publisher.")] = _RATES.publish,
    ingest_rate: Annotated[float, typer.Option(min=0.001, help="MB/s of a store, with fsync.")] = _RATES.ingest,
    read_rate: Annotated[float, typer.Option(min=0.001, help="MB/s that a store serves.")] = _RATES.read,
    as_json: JsonFlag = False,
) -> None:
    """Work out bytes, partitions, disk and seconds a step for a model and a batch size. Needs no broker.

    Disk: the log keeps 48 h, a store 24 h of what nobody deleted; deletes by prefix bring a store down to what is in
    use. The rates are those of one process on a small machine: measure yours (`make bench`) and pass them.

    Example: `moebus routes plan --model config.json --rollouts 1536 --tokens 32768`
    """
    card = read_card(model, "--model")
    where = Deployment(publishers, stores, replication, step_seconds)
    plan = plan_routes(card, rollouts, tokens, where, Rates(publish_rate, ingest_rate, read_rate))
    if as_json:
        emit({"model": card.to_dict(), "rollouts": rollouts, "tokens": tokens, **plan.as_dict()}, as_json=True)
        return
    out.print(_table(card, plan))
    if not plan.keeps_up:
        out.print(f"too slow for a step every {step_seconds:g} s: add stores (or publishers)", markup=False)


def _table(card: ModelCard, plan: RoutePlan) -> Table:
    table = Table(show_header=False)
    sent, step_sent = size_text(plan.rollout_wire), size_text(plan.step_wire)
    shape = f"{len(card.moe_layers)} MoE layers x top-{card.top_k} of {card.num_experts} experts, {card.dtype.name}"
    for name, value in (
        ("model", shape),
        ("a token", size_text(plan.token)),
        ("a rollout", f"{size_text(plan.rollout)}, {sent} sent in {plan.rollout_records} records"),
        ("a step", f"{size_text(plan.step)}, {step_sent} sent in {plan.step_records} records"),
        ("partitions", f"{plan.partitions} (moebus topics ensure --partitions {plan.partitions})"),
        ("disk of the brokers", f"{size_text(plan.log_disk)} for 48 h, all copies"),
        ("disk of the stores", f"{size_text(plan.store_disk)} for 24 h, one copy"),
        ("a step published in", f"{plan.publish_seconds:.3g} s"),
        ("a step stored in", f"{plan.ingest_seconds:.3g} s"),
        ("a step read in", f"{plan.read_seconds:.3g} s"),
        ("a step there after", f"{plan.step_seconds:.3g} s"),
    ):  # fmt: skip
        table.add_row(name, value)
    return table
