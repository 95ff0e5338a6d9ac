"""The `moebus` command. Each group of commands is a module of this folder; this one only puts them together."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from moebus.cli._context import Globals
from moebus.cli._output import JsonFlag, emit, fail
from moebus.observability.metrics import moebus_version
from moebus.schemas.errors import FatalError, MoebusError

_GROUPS = ("broker", "topics", "control", "routes", "dlt")
_COMMANDS = ("worker", "store", "gateway", "workers", "doctor", "demo")


class _Group(TyperGroup):
    """Turns the library's errors into one sentence on stderr and the documented exit code."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except MoebusError as exc:
            raise SystemExit(fail(exc)) from exc
        except OSError as exc:
            if exc.filename is None:  # not about a file that the user named: where it came from matters
                raise
            raise SystemExit(fail(FatalError(f"{exc.filename}: {exc.strerror}"))) from exc


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Kafka bus for the reinforcement learning of mixture-of-experts models.\n\n"
    "Start with `moebus demo`, or `moebus broker up` and `moebus topics ensure`.\n\n"
    "Exit codes: 0 done, 1 failed, 2 wrong use, 3 partial, 4 timeout, 5 no broker.",
)


@app.callback()
def root(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file (TOML); the environment goes over it.")
    ] = None,
    bootstrap: Annotated[
        str | None, typer.Option("--bootstrap-servers", help="Kafka brokers, `host:port[,host:port]`.")
    ] = None,
    prefix: Annotated[str | None, typer.Option("--topic-prefix", help="First part of every topic name.")] = None,
    log_format: Annotated[str | None, typer.Option("--log-format", help="`json` or `text`.")] = None,
    log_level: Annotated[str | None, typer.Option("--log-level", help="`DEBUG`, `INFO`, `WARNING`, `ERROR`.")] = None,
) -> None:
    ctx.obj = Globals(config, bootstrap, prefix, log_format, log_level)


@app.command()
def version(as_json: JsonFlag = False) -> None:
    """Print the versions of moebus and of what it runs on."""
    import kafka

    found = {"moebus": moebus_version(), "python": platform.python_version(), "kafka-python": kafka.__version__}
    emit(found, as_json=as_json, text="  ".join(f"{name} {number}" for name, number in found.items()))


for _name in _GROUPS:
    app.add_typer(importlib.import_module(f"moebus.cli.{_name}").app, name=_name)
for _name in _COMMANDS:
    app.command(_name)(importlib.import_module(f"moebus.cli.{_name}").command)
