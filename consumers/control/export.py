"""Writes the table of the lifecycle for the docs: `python -m moebus.consumers.control.export docs/lifecycle.md`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from moebus.consumers.control.lifecycle import (
    ASLEEP,
    Already,
    Command,
    Commit,
    Decision,
    Discard,
    Refuse,
    State,
    after_step,
    decide,
)
from moebus.engine.port import Capabilities
from moebus.schemas.control_args import Method, UpdateWeightsArgs, parse_args
from moebus.schemas.responses import Code, Lifecycle, Weights
from moebus.schemas.tags import Tag

_UPDATE = UpdateWeightsArgs(version="v2")
_PAUSED = State(phase=Lifecycle.PAUSED, version="v1")
STATES: dict[str, State] = {
    "STARTING": replace(_PAUSED, phase=Lifecycle.STARTING),
    "RUNNING": replace(_PAUSED, phase=Lifecycle.RUNNING),
    "DRAINING": replace(_PAUSED, phase=Lifecycle.DRAINING),
    "PAUSED": _PAUSED,
    "PAUSED, frozen": replace(_PAUSED, frozen=True),
    "PAUSED, weight asleep": replace(_PAUSED, weight=ASLEEP),
    "PAUSED, kv_cache asleep": replace(_PAUSED, kv_cache=ASLEEP),
    "PAUSED, both asleep": replace(_PAUSED, weight=ASLEEP, kv_cache=ASLEEP),
    "PAUSED, weights empty": replace(_PAUSED, weights=Weights.EMPTY),
    "UPDATING, staged": replace(_PAUSED, phase=Lifecycle.UPDATING, pending=7),
    "UPDATING, transfer": replace(
        _PAUSED, phase=Lifecycle.UPDATING, transferring=True, weights=Weights.EMPTY, version=None
    ),
    "TAINTED": replace(_PAUSED, fault=Lifecycle.TAINTED, reason="cut off"),
    "BEHIND": replace(_PAUSED, phase=Lifecycle.RUNNING, fault=Lifecycle.BEHIND, reason="no source"),
}
"""Every state of design section 3.4 by name. BEHIND: of a fleet that runs, with memory whole and resident."""

COMMANDS: dict[str, tuple[Method, dict[str, object]]] = {
    "pause": (Method.PAUSE, {}),
    "pause mode=keep": (Method.PAUSE, {"mode": "keep"}),
    "resume": (Method.RESUME, {}),
    "sleep": (Method.SLEEP, {}),
    "sleep tags=weight": (Method.SLEEP, {"tags": "weight"}),
    "sleep tags=kv_cache": (Method.SLEEP, {"tags": "kv_cache"}),
    "sleep tags=kv_cache mode=keep": (Method.SLEEP, {"tags": "kv_cache", "mode": "keep"}),
    "wakeup": (Method.WAKEUP, {}),
    "wakeup weights=empty": (Method.WAKEUP, {"weights": "empty"}),
    "wakeup tags=kv_cache resume=true": (Method.WAKEUP, {"tags": "kv_cache", "resume": True}),
    "wakeup resume=true": (Method.WAKEUP, {"resume": True}),
    "update_weights": (Method.UPDATE_WEIGHTS, {"version": "v2"}),
    "transfer_weights step=init": (Method.TRANSFER_WEIGHTS, {"step": "init"}),
    "transfer_weights step=start": (Method.TRANSFER_WEIGHTS, {"step": "start"}),
    "transfer_weights step=update": (Method.TRANSFER_WEIGHTS, {"step": "update"}),
    "transfer_weights step=finish": (Method.TRANSFER_WEIGHTS, {"step": "finish", "version": "v2"}),
    "reset_cache": (Method.RESET_CACHE, {}),
    "abort_requests": (Method.ABORT_REQUESTS, {"all": True}),
    "status": (Method.STATUS, {}),
    "begin_run": (Method.BEGIN_RUN, {"run": "r"}),
}
DECISIONS = ("decide commit", "decide void")
EVERYTHING = Capabilities(
    pause_modes=frozenset(("abort", "wait", "keep")),
    levels={tag: frozenset(("offload", "discard")) for tag in Tag},
    tags=frozenset(Tag),
    stage="loaded",
    cache_modes=frozenset(("reset", "keep", "recompute")),
    transfer=True,
    abort=True,
)
_HEAD = """# Lifecycle of a worker

Every command in every state: the code of the answer and, behind `→`, the state after it where that is another one.
Made from `consumers/control/lifecycle.py` by `make docs`; a test holds this page against the code, another one holds
every cell against a table written by hand.

- Before this table comes: `expired` (read after its deadline), `conflict` (the id belongs to another request, an
  `expect` or a `run` that does not hold), `invalid` (bad input), `unsupported` (the engine cannot).
- After it comes what the engine says: `failed`, `rank_failed`, `timeout`, `tainted`, `behind`; the state is then what
  the engine has.
- `keep` means requests in flight are frozen; without any, the state is plain PAUSED.
- An answer to sleep or wakeup says in `result.tags` for each tag asked for: `outcome` (`done`, `already`, `failed`) and
  `freed_bytes` (sleep) or `allocated_bytes` (wakeup).
- `decide` is answered under the id of its update; `-`: it does not concern this worker. A BEHIND worker that could not
  stage an update follows its commit, or stays BEHIND.
"""


def describe(state: State) -> str:
    """The state in words; the name of a column where it is one."""
    parts = [str(state.lifecycle)]
    asleep = [str(tag) for tag in Tag if state.tag(tag) is ASLEEP]
    if asleep:
        parts.append("both asleep" if len(asleep) == len(Tag) else f"{asleep[0]} asleep")
    if state.weights is Weights.EMPTY and not state.transferring:
        parts.append("weights empty")
    flags = {"frozen": state.frozen, "staged": state.pending is not None, "transfer": state.transferring}
    return ", ".join([*parts, *(name for name, on in flags.items() if on)])


def call(command: str, state: State, can: Capabilities = EVERYTHING, now_ms: int | None = 0) -> Decision:
    """What `decide` makes of one of `COMMANDS` at log position 11, whose deadline is at 1000 ms."""
    method, args = COMMANDS[command]
    return decide(state, Command(method, parse_args(method, args), 11, 1000), can, now_ms)


def cell(command: str, state: State) -> str:
    """The code of the answer, and the state after it where it is another one."""
    if command in DECISIONS:
        return _decided(command, state)
    decision = call(command, state)
    if isinstance(decision, Refuse):
        return str(decision.code)
    if isinstance(decision, Already):
        return _with(Code.ALREADY, state, decision.after or state)
    code = Code.PARTIAL if decision.short else Code.OK
    return _with("staged" if command == "update_weights" else code, state, decision.after)


def _decided(command: str, state: State) -> str:
    if state.pending is None:
        return "-"
    if command == "decide commit":
        return _with(Code.OK, state, after_step(state, Commit(state.pending, _UPDATE)))
    return _with("failed (voided)", state, after_step(state, Discard()))


def _with(code: Code | str, before: State, after: State) -> str:
    now = describe(after)
    return str(code) if now == describe(before) else f"{code} → {now}"


def page() -> str:
    """The page as Markdown."""
    rows = [f"| `{name}` | " + " | ".join(cell(name, s) for s in STATES.values()) + " |" for name in _commands()]
    table = [f"| command | {' | '.join(STATES)} |", "| --- |" + " --- |" * len(STATES), *rows]
    return "\n".join([_HEAD, *table, ""])


def _commands() -> tuple[str, ...]:
    return (*COMMANDS, *DECISIONS)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
