"""How `moebus control ...` issues a command, shows answers as they arrive, and prints the outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from moebus.cli._context import session
from moebus.cli._output import JsonFlag, emit, err, out
from moebus.cli._table import Cell, print_rows
from moebus.producers.control import ControlClient, Outcome
from moebus.producers.control.commands import default_timeout
from moebus.producers.control.outcome import position_text
from moebus.schemas.control import Expect, make_request
from moebus.schemas.control_args import Method
from moebus.schemas.responses import Code, ControlResponse, Phase

Build = Callable[..., "Mapping[str, Any] | None"]
"""A command's own options, to the args of its request (None: none)."""


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every command takes."""

    target: str | None
    timeout: float | None
    request_id: str | None
    run: str | None
    expect_after: int | None
    expect_version: str | None
    min_ok: int | None
    as_json: bool

    @property
    def expect(self) -> Expect | None:
        given = {"after": self.expect_after, "version": self.expect_version}
        chosen = {name: value for name, value in given.items() if value is not None}
        return Expect.parse(chosen, at="expect") if chosen else None


def _common(
    target: Annotated[
        str | None,
        typer.Option(help="`all` (default), a label selector such as `role=rollout,zone in (a,b)`, or one worker id."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, max=86400, help="Seconds it may take (default 60, updates 600).")
    ] = None,
    request_id: Annotated[
        str | None,
        typer.Option(help="Identity of the command; the same one again joins the first and has no new effect."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Refuse on workers that have begun another run.")] = None,
    expect_after: Annotated[
        int | None, typer.Option(min=-1, help="Refuse where a later command than this offset changed the worker.")
    ] = None,
    expect_version: Annotated[str | None, typer.Option(help="Refuse where the weights are of another version.")] = None,
    min_ok: Annotated[int | None, typer.Option(min=1, help="So many good answers are enough (default: all).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Only its signature is used: it is added to that of every command."""


def add_command(app: typer.Typer, name: str, method: Method) -> Callable[[Build], Build]:
    """Registers `build` as a command: its own options and the common ones; its docstring is the help."""

    def register(build: Build) -> Build:
        def run_command(ctx: typer.Context, **given: Any) -> None:
            common = Common(**{field.name: given.pop(field.name) for field in fields(Common)})
            issue(ctx, method, build(**given), common)

        own = inspect.signature(build, eval_str=True).parameters.values()
        shared = inspect.signature(_common, eval_str=True).parameters.values()
        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *shared)]
        run_command.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
        run_command.__annotations__ = {p.name: p.annotation for p in (context, *parameters)}
        run_command.__doc__ = build.__doc__
        app.command(name)(run_command)
        return build

    return register


def issue(ctx: typer.Context, method: Method, args: Mapping[str, Any] | None, common: Common) -> None:
    """Appends the command, waits, prints the outcome; ends with its exit code.

    Raises:
        BrokerUnavailable, InvalidInput, TopicMissing.
    """
    timeout = common.timeout if common.timeout is not None else default_timeout(method)
    # Wrong use is said at once, also where no broker answers.
    make_request(common.request_id or "unsent", method, args, target=common.target, run=common.run)
    with session(ctx) as s, ControlClient(s.broker, s.topics) as client:
        operation = client.submit(
            method,
            args,
            target=common.target,
            deadline_s=timeout,
            request_id=common.request_id,
            expect=common.expect,
            run=common.run,
            min_ok=common.min_ok,
        )
        if common.as_json:
            outcome = operation.wait(timeout)
        else:
            where = position_text(operation.position)
            err.print(f"{method} {operation.request_id} appended at {where}", markup=False, soft_wrap=True)
            with _Answers(str(method)) as answers:
                outcome = operation.wait(timeout, answers.show)
    emit(outcome.as_dict(), as_json=common.as_json)
    if not common.as_json:
        print_outcome(outcome)
    if not outcome.ok:
        err.print(f"moebus: {outcome.sentence()}", markup=False, soft_wrap=True)
        raise typer.Exit(outcome.exit_code)


def print_outcome(outcome: Outcome, so_far: bool = False) -> None:
    """One row a worker, the missing ones too, and a line for the whole. `so_far`: answers may still come."""
    rows: list[tuple[Cell, ...]] = []
    for worker, response in outcome.responses.items():
        rows.append((worker, _code(response.code), *_state(response), _message(response)))
    rows += [(worker, Text("no answer", style="red"), "", "", "", "") for worker in outcome.missing]
    for worker, response in outcome.others.items():
        rows.append((worker, _code(response.code), *_state(response), f"(not expected) {_message(response)}"))
    print_rows(out, ("worker", "answer", "state", "memory", "version", "message"), rows)
    decision = f", {outcome.decision}" if outcome.decision is not None else ""
    status = f"{outcome.status} so far" if so_far and not outcome.complete else outcome.status
    out.print(f"{status}{decision}: {outcome.request_id}", markup=False, soft_wrap=True)


class _Answers:
    """A bar on stderr and a line for every answer."""

    def __init__(self, title: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=err, transient=True)
        self._task = self._progress.add_task(title, total=None)
        self._done: set[str] = set()

    def __enter__(self) -> _Answers:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, response: ControlResponse) -> None:
        """Takes an answer in, as it arrives."""
        if response.phase is Phase.EXPECTED:
            self._progress.update(self._task, total=len(response.expected_workers))
            return
        worker = response.worker_id or "?"
        text = str(response.phase) if response.phase is not Phase.DONE else str(response.code)
        line = f"  {worker}  {text}{'  ' if response.message else ''}{response.message}"
        self._progress.console.print(line, markup=False, soft_wrap=True)
        if response.phase is Phase.DONE and worker not in self._done:
            self._done.add(worker)
            self._progress.advance(self._task)


def _code(code: Code) -> Text:
    return Text(str(code), style="green" if code.good else "yellow" if code is Code.PARTIAL else "red")


def _state(response: ControlResponse) -> tuple[str, str, str]:
    state = response.state
    if state is None:
        return "", "", ""
    memory = " ".join(f"{tag}:{residency}" for tag, residency in state.tags.items())
    if str(state.weights) == "empty":
        memory += " (weights empty)"
    return str(state.lifecycle), memory, state.version or "unknown"


def _message(response: ControlResponse) -> Text:
    tags = (response.result or {}).get("tags")
    parts = [response.message] if response.message else []
    if isinstance(tags, dict):
        parts += [f"{tag} {_tag_text(entry)}" for tag, entry in tags.items()]
    return Text("; ".join(parts))


def _tag_text(entry: object) -> str:
    """`done, freed 3.0 MiB`, `already`, `failed, why`."""
    if not isinstance(entry, dict):
        return str(entry)
    parts = [str(entry.get("outcome", ""))]
    for name, verb in (("freed_bytes", "freed"), ("allocated_bytes", "allocated")):
        count = entry.get(name)
        if isinstance(count, int) and count:
            parts.append(f"{verb} {human_bytes(count)}")
    if entry.get("message"):
        parts.append(str(entry["message"]))
    return ", ".join(part for part in parts if part)


def human_bytes(count: int) -> str:
    """`1.5 MiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
