"""`moebus control` and `moebus workers` against scripted workers: on the in-memory log, and on Kafka."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from pydantic import JsonValue
from typer.testing import CliRunner, Result

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import Broker
from moebus.broker.topics import Topics, ensure
from moebus.cli import _context, _output, control, workers
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.simulated import SimulatedEngine
from moebus.observability.settings import KafkaSettings
from moebus.schemas.control_args import Method
from moebus.schemas.errors import MoebusError
from moebus.schemas.responses import Code, Phase
from tests.support.fake_worker import FakeWorker, Reply, staged
from tests.support.wait import wait_until

TOPICS = Topics("t")
app = typer.Typer()
app.add_typer(control.app, name="control")
app.command("workers")(workers.command)


class Shared(MemoryBroker):
    """Outlives the commands that open and close it."""

    def close(self) -> None:
        """Nothing: the test's workers are on it."""


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBroker]:
    broker = Shared()
    ensure(broker.admin(), TOPICS)

    def opened(_: KafkaSettings) -> Broker:
        return broker

    monkeypatch.setattr(_context, "open_broker", opened)
    monkeypatch.setenv("MOEBUS_TOPIC_PREFIX", "t")
    monkeypatch.setenv("COLUMNS", "240")
    yield broker
    MemoryBroker.close(broker)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def objects(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_command_shows_answers_and_the_table(broker: MemoryBroker) -> None:
    freed: dict[str, JsonValue] = {"tags": {"kv_cache": {"outcome": "done", "freed_bytes": 3 << 20}}}
    script = {Method.SLEEP: (Reply(Phase.ACCEPTED), Reply(result=freed, message="freed"))}
    with FakeWorker(broker, TOPICS, "worker-1", script=script):
        result = run("control", "sleep", "--tags", "kv_cache", "--request-id", "s-1")
    assert result.exit_code == 0, result.output
    assert "sleep s-1 appended at t.control.requests.v1/0/1" in result.stderr
    assert "worker-1  accepted" in result.stderr
    assert "worker-1  ok  freed" in result.stderr
    assert "kv_cache done, freed 3.0 MiB" in result.stdout
    assert "ok: s-1" in result.stdout


@pytest.mark.parametrize(
    ("args", "method", "sent"),
    [
        (("pause", "--mode", "keep"), "pause", {"mode": "keep"}),
        (("resume",), "resume", None),
        (("sleep", "--level", "discard"), "sleep", {"level": "discard", "mode": "abort"}),
        (("wakeup", "--weights", "empty"), "wakeup", {"weights": "empty", "resume": False}),
        (
            ("wakeup", "--tags", "weight", "--resume"),
            "wakeup",
            {"tags": "weight", "weights": "restore", "resume": True},
        ),
        (
            ("update-weights", "--version", "v2", "--source", "/x", "--digest", "d1", "--cache", "keep"),
            "update_weights",
            {"version": "v2", "source": "/x", "digest": "d1", "cache": "keep"},
        ),
        (("reset-cache",), "reset_cache", None),
        (("abort", "--all"), "abort_requests", {"all": True}),
        (("abort", "r1", "r2"), "abort_requests", {"ids": ["r1", "r2"]}),
        (("status",), "status", None),
        (("begin-run", "exp-7"), "begin_run", {"run": "exp-7"}),
    ],
)
def test_every_command_sends_what_it_says(
    broker: MemoryBroker, args: tuple[str, ...], method: str, sent: dict[str, Any] | None
) -> None:
    with FakeWorker(broker, TOPICS, "a") as worker:
        options = (
            "--target",
            "a",
            "--timeout",
            "20",
            "--run",
            "r",
            "--expect-after",
            "0",
            "--expect-version",
            "v1",
            "--json",
        )
        result = run("control", *args, *options)
        request = next(r for r in worker.seen if r.method == method)
    assert result.exit_code == 0, result.output
    assert objects(result)[0]["status"] == "ok"
    assert request.args == sent
    assert (request.target, request.deadline_s, request.run) == ("a", 20.0, "r")
    assert request.expect is not None
    assert (request.expect.after, request.expect.version) == (0, "v1")


def test_exit_codes_and_one_sentence_on_stderr(broker: MemoryBroker) -> None:
    bad = {
        Method.PAUSE: (Reply(code=Code.CONFLICT, message="run [/is] over"),),
        Method.SLEEP: (),
        Method.UPDATE_WEIGHTS: staged("other"),
    }
    with FakeWorker(broker, TOPICS, "a"), FakeWorker(broker, TOPICS, "b", script=bad):
        partial = run("control", "pause")
        failed = run("control", "pause", "--target", "b", "--json")
        late = run("control", "sleep", "--timeout", "0.05")
        nobody = run("control", "resume", "--target", "role=x")
        voided = run("control", "update-weights", "--version", "v2")
        wrong = run("control", "pause", "--mode", "softly")
        enough = run("control", "pause", "--min-ok", "1")
    codes = [r.exit_code for r in (partial, failed, late, nobody, voided, wrong, enough)]
    assert codes == [3, 1, 4, 1, 1, 2, 0]
    assert "b answered conflict: run [/is] over" in partial.stderr
    assert objects(failed)[0]["responses"]["b"]["code"] == "conflict"
    assert "run [/is] over" in partial.stdout  # no markup of rich's
    assert "no answer in time from b" in late.stderr
    assert "no answer" in late.stdout
    assert "no live worker matches" in nobody.stderr
    assert "failed, void" in voided.stdout


def test_bad_input_is_refused_by_name_before_anything_is_sent(broker: MemoryBroker) -> None:
    with FakeWorker(broker, TOPICS, "a") as worker:
        for args, field in (
            (("sleep", "--tags", "gpu"), "tags"),
            (("abort",), "ids"),
            (("abort", "r1", "--all"), "ids"),
            (("pause", "--target", "a b"), "target"),
            (("begin-run", "a b"), "run"),
        ):
            result = run("control", *args)
            assert isinstance(result.exception, MoebusError)
            assert result.exception.exit_code == 2
            assert field in str(result.exception)
        run("control", "status")
        assert [str(r.method) for r in worker.seen] == ["hello", "status"]


def test_show_tells_the_life_of_a_command(broker: MemoryBroker) -> None:
    with FakeWorker(broker, TOPICS, "a"):
        run("control", "update-weights", "--version", "v2", "--request-id", "u-1")
    text = run("control", "show", "u-1").stdout
    for word in ("published", "expected", "accepted", "staged", "commit", "done ok", "ok, commit: u-1"):
        assert word in text
    shown = objects(run("control", "show", "u-1", "--json"))[0]
    assert shown["outcome"]["status"] == "ok"
    whats = [event["what"] for event in shown["events"] if event["what"] != "expected"]
    assert whats == ["published", "accepted", "staged", "commit", "done"]
    unknown = run("control", "show", "u-2")
    assert isinstance(unknown.exception, MoebusError)
    assert unknown.exception.exit_code == 1


def test_ids_and_positions_are_whole_in_a_narrow_window(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns are narrower than a row of any of these tables: each id and each position is on one line."""
    monkeypatch.setattr(_output.out, "width", 80)
    request_id = f"control-{'4f0c' * 16}"
    worker = "rollout-worker.rack-12.host-0042.example-zone-b"
    with FakeWorker(broker, TOPICS, worker, {"role": "rollout"}):
        run("control", "update-weights", "--version", "v2", "--request-id", request_id)
        shown = [run("control", "show", request_id), run("control", "history"), run("workers"), run("workers", worker)]
        trace = objects(run("control", "show", request_id, "--json"))[0]
    show, history, workers_text, one = (result.stdout for result in shown)
    for event in trace["events"]:
        assert event["where"] in show
        assert event["actor"] in show
    for text, word in ((show, request_id), (history, request_id), (workers_text, worker), (one, worker)):
        assert word in text
    assert "\u2026" not in show + history + workers_text + one, "something was cut"
    monkeypatch.setattr(_output.out, "width", 240)
    assert max(map(len, run("control", "show", request_id).stdout.splitlines())) > 80, "a table where there is room"


def test_history_is_one_object_a_line(broker: MemoryBroker) -> None:
    with FakeWorker(broker, TOPICS, "a"):
        run("control", "pause", "--request-id", "p-1")
        run("control", "resume", "--request-id", "r-1")
    assert [entry["request_id"] for entry in objects(run("control", "history", "--json"))] == ["p-1", "r-1"]
    text = run("control", "history", "--limit", "1").stdout
    assert "r-1" in text
    assert "p-1" not in text


def test_workers(broker: MemoryBroker) -> None:
    with FakeWorker(broker, TOPICS, "a", {"role": "rollout"}), FakeWorker(broker, TOPICS, "b"):
        assert [w["member_id"] for w in objects(run("workers", "--json"))] == ["a", "b"]
        one = objects(run("workers", "a", "--json"))
        assert len(one) == 1
        assert one[0]["live"] is True
        assert one[0]["labels"] == {"role": "rollout"}
        assert "rollout" in run("workers", "a").stdout
        assert "ready" in run("workers").stdout
        unknown = run("workers", "c")
    assert isinstance(unknown.exception, MoebusError)
    assert "known are a, b" in str(unknown.exception)


@pytest.mark.parametrize(
    "command",
    [
        "pause",
        "resume",
        "sleep",
        "wakeup",
        "update-weights",
        "reset-cache",
        "abort",
        "status",
        "begin-run",
        "show",
        "history",
    ],
)
def test_help_teaches_with_an_example(command: str) -> None:
    result = run("control", command, "--help")
    assert result.exit_code == 0
    assert f"moebus control {command}" in result.stdout
    assert "--json" in result.stdout


def kcat(*args: str, stdin: str = "") -> str:
    done = subprocess.run(["kcat", *args], input=stdin, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def answers(bootstrap: str, topic: str, worker: str) -> list[dict[str, Any]]:
    """What kcat reads of `worker`'s final answers."""
    text = kcat("-b", bootstrap, "-t", topic, "-C", "-o", "beginning", "-e", "-q", "-f", "%s\n")
    found = [json.loads(line) for line in text.splitlines()]
    return [one for one in found if one.get("worker_id") == worker and one["phase"] == "done"]


@pytest.mark.kafka
def test_kcat_publishes_a_bare_command_and_reads_the_answer(
    kafka_broker: LocalCluster, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics, bootstrap = Topics(topic_prefix), kafka_broker.bootstrap
    broker, engine = open_broker(bootstrap), SimulatedEngine()
    monkeypatch.setenv("MOEBUS_KAFKA__BOOTSTRAP_SERVERS", bootstrap)
    monkeypatch.setenv("MOEBUS_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("COLUMNS", "240")
    ensure(broker.admin(), topics)
    host = ControlWorkerHost(broker, topics, [WorkerSpec("worker-1", engine)])
    host.start()
    try:
        wait_until(lambda: [w for w in objects(run("workers", "--json")) if w["ready"]], 30, "a ready worker")
        bare = '{"request_id":"control-1","method":"pause","args":{}}'
        kcat("-b", bootstrap, "-t", topics.control_requests, "-P", stdin=bare)
        found = wait_until(lambda: answers(bootstrap, topics.control_responses, "worker-1"), 30, "the answer", step=0.1)
        assert [(one["request_id"], one["code"]) for one in found] == [("control-1", "ok")]
        assert engine.inspect().paused
        shown = objects(run("control", "show", "control-1", "--json"))[0]
        assert (shown["outcome"]["expected"], shown["outcome"]["status"]) == (None, "ok")
        update = run("control", "update-weights", "--version", "v2", "--timeout", "30", "--json")
        assert update.exit_code == 0, update.output
        assert objects(update)[0]["decision"] == "commit"
        assert engine.inspect().version == "v2"
        assert run("control", "resume", "--expect-version", "v1").exit_code == 1
        assert run("control", "resume", "--expect-version", "v2").exit_code == 0
    finally:
        host.stop()
        broker.close()
