"""Every command in every state: the code, and the lifecycle afterwards (design section 3.4)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebus.consumers.control import export
from moebus.consumers.control.lifecycle import (
    Already,
    Command,
    Commit,
    Decision,
    Discard,
    Pause,
    Refuse,
    Resume,
    Run,
    Sleep,
    Stage,
    State,
    Wake,
    after_step,
    decide,
)
from moebus.engine.port import Capabilities
from moebus.engine.simulated.engine import CAPABILITIES
from moebus.schemas.control_args import Method, UpdateWeightsArgs, parse_args
from moebus.schemas.responses import Code, Lifecycle, Weights
from moebus.schemas.tags import Tag

# Short names of the rows and columns of docs/lifecycle.md.
COLUMNS = {
    "starting": "STARTING",
    "running": "RUNNING",
    "draining": "DRAINING",
    "paused": "PAUSED",
    "frozen": "PAUSED, frozen",
    "w_asleep": "PAUSED, weight asleep",
    "kv_asleep": "PAUSED, kv_cache asleep",
    "asleep": "PAUSED, both asleep",
    "empty": "PAUSED, weights empty",
    "staged": "UPDATING, staged",
    "transfer": "UPDATING, transfer",
    "tainted": "TAINTED",
    "behind": "BEHIND",
}
ROWS = {
    "pause": "pause",
    "pause keep": "pause mode=keep",
    "resume": "resume",
    "sleep": "sleep",
    "sleep weight": "sleep tags=weight",
    "sleep kv": "sleep tags=kv_cache",
    "sleep kv keep": "sleep tags=kv_cache mode=keep",
    "wakeup": "wakeup",
    "wakeup empty": "wakeup weights=empty",
    "wakeup kv resume": "wakeup tags=kv_cache resume=true",
    "wakeup resume": "wakeup resume=true",
    "update": "update_weights",
    "transfer init": "transfer_weights step=init",
    "transfer start": "transfer_weights step=start",
    "transfer update": "transfer_weights step=update",
    "transfer finish": "transfer_weights step=finish",
    "reset_cache": "reset_cache",
    "abort": "abort_requests",
    "status": "status",
    "begin_run": "begin_run",
}
STATES = {short: export.STATES[name] for short, name in COLUMNS.items()}
COMMANDS = {short: export.COMMANDS[name] for short, name in ROWS.items()}
PAUSED = STATES["paused"]
# +X: ok, then lifecycle X; =: already; p: partial; i: illegal_state; c: conflict; t: tainted; b: behind
# R running, P paused, U updating, T tainted, B behind, S starting, D draining
TABLE = """
                  starting running draining paused frozen w_asleep kv_asleep asleep empty staged transfer tainted behind
pause             i        +P      i        =      +P     =        =         =      =     c      =        =       =
pause keep        i        +P      i        =      =      =        =         =      =     c      =        =       =
resume            i        =       i        +R     +R     i        i         i      i     c      i        t       b
sleep             i        +P      i        +P     i      +P       +P        =      +P    c      i        +T      +B
sleep weight      i        +P      i        +P     +P     =        +P        =      +P    c      i        +T      +B
sleep kv          i        +P      i        +P     i      +P       =         =      +P    c      +U       +T      +B
sleep kv keep     i        i       i        +P     i      +P       =         =      +P    c      +U       +T      +B
wakeup            i        =       i        =      =      +P       +P        +P     +P    c      i        =       =
wakeup empty      i        =       i        =      =      +P       +P        +P     =     c      =        =       =
wakeup kv resume  i        =       i        +R     +R     p        +R        p      p     c      p        t       b
wakeup resume     i        =       i        +R     +R     +R       +R        +R     +R    c      i        t       b
update            i        i       i        +U     +U     i        +U        i      +U    c      +U       +U      +U
transfer init     i        i       i        +P     +P     i        +P        i      +P    c      +U       +T      +B
transfer start    i        i       i        +U     +U     i        +U        i      +U    c      +U       +U      +U
transfer update   i        i       i        i      i      i        i         i      i     c      +U       i       i
transfer finish   i        i       i        i      i      i        i         i      i     c      +P       i       i
reset_cache       i        +R      i        +P     +P     +P       =         =      +P    +U     +U       +T      +B
abort             i        +R      i        +P     +P     +P       +P        +P     +P    +U     +U       +T      +B
status            +S       +R      +D       +P     +P     +P       +P        +P     +P    +U     +U       +T      +B
begin_run         i        +P      i        +P     +P     +P       +P        +P     +P    c      +T       +T      +B
"""
WORDS = {
    "i": "illegal_state",
    "c": "conflict",
    "t": "tainted",
    "b": "behind",
    "=": "already",
    "p": "partial",
    **{f"+{name[0]}": f"ok {name}" for name in map(str, Lifecycle)},
}


def cells() -> list[tuple[str, str, str]]:
    header, *rows = TABLE.strip("\n").splitlines()
    columns = header.split()
    found = []
    for row in rows:
        name, codes = row[:18].strip(), row[18:].split()
        assert len(codes) == len(columns), row
        found += [(name, column, WORDS[code]) for column, code in zip(columns, codes, strict=True)]
    return found


def call(command: str, state: State, can: Capabilities = CAPABILITIES, now_ms: int | None = 0) -> Decision:
    return export.call(ROWS[command], state, can, now_ms)


def outcome(decision: Decision) -> str:
    if isinstance(decision, Refuse):
        return str(decision.code)
    if isinstance(decision, Already):
        return "already"
    return "partial" if decision.short else f"ok {decision.after.lifecycle}"


@pytest.mark.parametrize(("command", "state", "expected"), cells())
def test_table(command: str, state: str, expected: str) -> None:
    assert outcome(call(command, STATES[state])) == expected


def test_the_table_is_whole() -> None:
    assert {(command, state) for command, state, _ in cells()} == {(c, s) for c in COMMANDS for s in STATES}
    assert list(COLUMNS.values()) == list(export.STATES)
    assert list(ROWS.values()) == list(export.COMMANDS)
    assert {args[0] for args in COMMANDS.values()} == set(Method) - {Method.HELLO, Method.DECIDE}


def test_the_page_of_the_lifecycle_is_current() -> None:
    page = (Path(__file__).parents[3] / "docs/lifecycle.md").read_text()
    assert page == export.page(), "run `make docs`"


@pytest.mark.parametrize(("command", "state", "expected"), cells())
def test_the_page_says_what_the_table_says(command: str, state: str, expected: str) -> None:
    """The page tells more (which tags sleep); its code and lifecycle are those of the table above."""
    code, _, after = export.cell(ROWS[command], STATES[state]).partition(" → ")
    lifecycle = (after or COLUMNS[state]).partition(",")[0]
    if expected.startswith("ok"):
        assert (code, lifecycle) == ("staged" if command == "update" else "ok", expected[3:])
    else:
        assert code == expected


@pytest.mark.parametrize("state", [name for name in COLUMNS if name != "staged"])
def test_a_decision_concerns_only_who_staged(state: str) -> None:
    assert [export.cell(name, STATES[state]) for name in export.DECISIONS] == ["-", "-"]


@pytest.mark.parametrize("name", export.STATES)
def test_states_are_described_by_their_names(name: str) -> None:
    assert export.describe(export.STATES[name]) == name


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", STATES)
def test_the_steps_lead_to_the_state_after(command: str, state: str) -> None:
    decision = call(command, STATES[state])
    if not isinstance(decision, Run) or command == "begin_run":
        return
    reached = STATES[state]
    for step in decision.steps:
        reached = after_step(reached, step)
    assert reached == decision.after
    assert not (decision.after.running and decision.after.missing()), "it would serve without memory"


@pytest.mark.parametrize("state", STATES)
def test_a_late_command_is_expired(state: str) -> None:
    assert outcome(call("pause", STATES[state], now_ms=1000)) == "expired"
    assert outcome(call("pause", STATES[state], now_ms=999)) != "expired"


def test_resume_names_everything_that_is_missing() -> None:
    state = replace(STATES["asleep"], weights=Weights.EMPTY)
    refused = call("resume", state)
    assert isinstance(refused, Refuse)
    assert refused.message == "weight is asleep, kv_cache is asleep, weights hold nothing"


def test_sleep_pauses_a_running_engine_first_and_leaves_out_what_sleeps() -> None:
    decision = call("sleep", STATES["running"])
    assert isinstance(decision, Run)
    assert decision.steps == (Pause("abort"), Sleep(Tag.WEIGHT, "offload"), Sleep(Tag.KV_CACHE, "offload"))
    mixed = call("sleep", STATES["kv_asleep"])
    assert isinstance(mixed, Run)
    assert (mixed.steps, mixed.tags) == ((Sleep(Tag.WEIGHT, "offload"),), (Tag.KV_CACHE,))


def test_wakeup_resumes_last() -> None:
    decision = decide(
        STATES["asleep"],
        Command(Method.WAKEUP, parse_args(Method.WAKEUP, {"resume": True}), 1),
        CAPABILITIES,
        None,
    )
    assert isinstance(decision, Run)
    assert decision.steps == (Wake(Tag.WEIGHT, "restore"), Wake(Tag.KV_CACHE, "restore"), Resume())


def test_an_update_is_staged_then_committed_or_discarded() -> None:
    args = UpdateWeightsArgs(version="v2")
    staged = after_step(STATES["behind"], Stage(7, args))
    assert (staged.lifecycle, staged.pending) == (Lifecycle.UPDATING, 7)
    committed = after_step(staged, Commit(7, args))
    assert committed == replace(PAUSED, version="v2", version_offset=7)
    voided = after_step(staged, Discard())
    assert (voided.lifecycle, voided.pending) == (Lifecycle.BEHIND, None)


def test_pausing_what_is_behind_keeps_it_closed_once_cured() -> None:
    decision = call("pause", STATES["behind"])
    assert isinstance(decision, Already)
    assert decision.after is not None
    assert decision.after.phase is Lifecycle.PAUSED


@pytest.mark.parametrize(
    ("change", "command"),
    [
        ({"pause_modes": frozenset(("abort",))}, "pause keep"),
        ({"levels": {}}, "sleep weight"),
        ({"tags": frozenset()}, "sleep kv"),
        ({"transfer": False}, "transfer start"),
        ({"cache_modes": frozenset(("keep",))}, "update"),
        ({"abort": False}, "abort"),
        ({"sleeps_whole": True}, "sleep kv"),
        ({"wakes_whole": True}, "wakeup kv resume"),
    ],
)
def test_what_the_engine_cannot_do_is_unsupported(change: dict[str, object], command: str) -> None:
    state = STATES[{"pause keep": "running", "wakeup kv resume": "asleep"}.get(command, "paused")]
    decision = call(command, state, replace(CAPABILITIES, **change))  # type: ignore[arg-type]
    assert isinstance(decision, Refuse)
    assert decision.code is Code.UNSUPPORTED


@pytest.mark.parametrize("command", ["sleep", "wakeup"])
def test_what_goes_only_together_goes_together(command: str) -> None:
    can = replace(CAPABILITIES, sleeps_whole=True, wakes_whole=True)
    for state in ("w_asleep", "kv_asleep", "asleep", "paused"):
        assert not isinstance(call(command, STATES[state], can), Refuse)


@pytest.mark.parametrize(
    ("state", "lifecycle", "version"),
    [
        ("paused", "PAUSED", "v1"),
        ("empty", "PAUSED", None),
        ("transfer", "UPDATING", None),
        ("tainted", "TAINTED", None),
        ("w_asleep", "PAUSED", "v1"),
    ],
)
def test_view(state: str, lifecycle: str, version: str | None) -> None:
    view = STATES[state].view()
    assert (view.lifecycle, view.version) == (lifecycle, version)


def test_ending_frozen_requests_leaves_a_transfer_open() -> None:
    state = replace(STATES["transfer"], frozen=True)
    decision = call("pause", state)
    assert isinstance(decision, Run)
    assert decision.after == STATES["transfer"]


@given(st.lists(st.sampled_from([*COMMANDS, "commit", "void"]), max_size=30))
def test_no_sequence_of_commands_serves_without_memory(commands: list[str]) -> None:
    state = State()
    for offset, name in enumerate(commands):
        if name in ("commit", "void"):
            if state.pending is not None:
                args = UpdateWeightsArgs(version=f"v{state.pending}")
                state = after_step(state, Commit(state.pending, args) if name == "commit" else Discard())
                assert state.pending is None
            continue
        method, args_of = COMMANDS[name]
        decision = decide(state, Command(method, parse_args(method, args_of), offset), CAPABILITIES, None)
        state = decision.after if isinstance(decision, Run) else state
        assert not (state.running and (state.missing() or state.pending is not None))
        assert (state.phase is Lifecycle.UPDATING) == (state.pending is not None or state.transferring)
        assert state.view().version is None or state.weights is Weights.VALID
