"""`moebus doctor`: every check on its own, on a broker in memory, and the limits of time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import OutRecord
from moebus.broker.topics import Topics, ensure
from moebus.cli import _doctor_local as local
from moebus.cli._doctor import Check, Finding, examine
from moebus.cli._doctor_broker import check_clock, check_members, check_topics
from moebus.observability.clock import ManualClock
from moebus.observability.settings import Settings
from moebus.schemas.errors import FatalError
from moebus.schemas.members import MemberState, encode_member
from moebus.schemas.responses import Lifecycle, Weights, WorkerState
from tests.support.cli import MemoryCli, run_command

TOPICS = Topics("t")
GOOD = [Finding("a", "ok", "fine")]


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


# -- the limits


def test_a_check_that_hangs_is_given_up() -> None:
    never = Event()

    def hang() -> list[Finding]:
        never.wait(60)
        return GOOD

    begun = time.monotonic()
    found = list(examine([Check("slow", 0.05, hang), Check("next", 30, lambda: GOOD)]))
    never.set()
    assert time.monotonic() - begun < 10
    assert found == [Finding("slow", "problem", "no answer within 0.05 s"), *GOOD]


def test_what_a_check_raises_is_a_finding() -> None:
    def ours() -> list[Finding]:
        raise FatalError("one clear sentence")

    def other() -> list[Finding]:
        raise OSError("broken")

    found = list(examine([Check("ours", 30, ours), Check("other", 30, other)]))
    assert [one.message for one in found] == ["one clear sentence", "OSError: broken"]
    assert statuses(found) == ["problem", "problem"]


def test_what_needs_a_bad_check_is_skipped() -> None:
    def bad() -> list[Finding]:
        raise FatalError("no")

    chain = [Check("a", 30, bad), Check("b", 30, lambda: GOOD, "a"), Check("c", 30, lambda: GOOD, "b")]
    assert statuses(list(examine(chain))) == ["problem", "skipped", "skipped"]


# -- this machine


def test_python() -> None:
    assert statuses(local.check_python()) == ["ok"]
    assert local.check_python((3, 9)) == [
        Finding("python", "problem", "Python 3.9 is too old", "install Python 3.10 or newer")
    ]


def test_packages_of_this_environment() -> None:
    assert "problem" not in statuses(local.check_packages())


@pytest.mark.parametrize(
    ("versions", "status", "text"),
    [
        ({"kafka-python": None}, "problem", "not installed"),
        ({"kafka-python": "2.0.2"}, "problem", "2.0.2 is not what"),
        ({"kafka-python": "3.1.0"}, "problem", "3.1.0 is not what"),
        ({"kafka-python": "3.0.12.post1"}, "ok", "3.0.12.post1"),
        ({"crc32c": None}, "problem", "3 MB/s"),
        ({"lmdb": None}, "warning", "no `moebus store`"),
        ({"paddlepaddle": None}, "ok", "only `--engine paddle` needs it"),
        ({"paddlepaddle": None, "paddlepaddle-gpu": "3.2.0"}, "ok", "PaddlePaddle 3.2.0"),
        ({"paddlepaddle": "2.6.2"}, "warning", "too old"),
        ({"paddlepaddle-gpu": "3.2.0"}, "problem", "overwrite each other"),
    ],
)
def test_packages(versions: dict[str, str | None], status: str, text: str) -> None:
    known: dict[str, str | None] = {
        "kafka-python": "3.0.12", "crc32c": "2.7", "lmdb": "1.5", "paddlepaddle": "3.3.1", **versions
    }  # fmt: skip
    found = [one for one in local.check_packages(known.get) if text in one.message]
    assert statuses(found) == [status]


@pytest.mark.parametrize(
    ("module", "status"),
    [(SimpleNamespace(hardware_based=False), "warning"), (SimpleNamespace(), "problem")],
)
def test_a_slow_or_broken_crc32c(monkeypatch: pytest.MonkeyPatch, module: object, status: str) -> None:
    monkeypatch.setattr("moebus.cli._doctor_local.importlib.import_module", lambda name: module)
    assert local._crc32c("2.7").status == status


def test_settings_that_nobody_knows() -> None:
    environ = {"MOEBUS_KAFKA__BOOTSTRAP_SERVER": "x", "MOEBUS_TOPIC_PREFIX": "t", "MOEBUS_SERVICE_HOST": "k8s"}
    found = local.check_settings(Settings(topic_prefix="t"), environ)
    assert statuses(found) == ["ok", "warning"]
    assert "MOEBUS_KAFKA__BOOTSTRAP_SERVERS" in found[1].message


def test_a_weight_root_that_is_not_there() -> None:
    settings = Settings(worker={"weight_roots": ("/no/such/folder", "s3://bucket/ckpt", ".")})
    found = local.check_settings(settings, {})
    assert [one.message for one in found if one.status == "warning"] == [
        "the weight root /no/such/folder is no folder of this machine: a worker refuses every source below it"
    ]


@pytest.mark.parametrize(
    ("free", "explicit", "status", "text"),
    [
        (600 << 20, None, "ok", "600 MiB free"),
        (64 << 20, None, "warning", "gets 32 MiB"),
        (64 << 20, 128 << 20, "problem", "refuses to start"),
        (200 << 20, 128 << 20, "ok", "200 MiB free"),
    ],
)
def test_room_for_the_journal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, explicit: int | None, status: str, text: str
) -> None:
    monkeypatch.setattr("moebus.cli._doctor_local.shutil.disk_usage", lambda place: SimpleNamespace(free=free))
    settings = Settings(publisher={"max_bytes": explicit})
    (found,) = local.check_journal(settings, tmp_path)
    assert found.status == status
    assert text in found.message


def test_no_place_for_the_journal(tmp_path: Path) -> None:
    (found,) = local.check_journal(Settings(), tmp_path / "none")
    assert (found.status, "MODE=thread" in found.fix) == ("warning", True)


# -- the log


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    memory = MemoryBroker()
    yield memory
    memory.close()


def test_topics_that_are_missing_or_differ(broker: MemoryBroker) -> None:
    found = check_topics(broker, TOPICS)
    assert statuses(found) == ["problem"] * 5
    assert found[0].fix == "moebus --topic-prefix t topics ensure"
    ensure(broker.admin(), TOPICS, routes_partitions=3)
    assert check_topics(broker, TOPICS) == [Finding("topics", "ok", "5 of 5 topics are as defined")]
    broker.admin().set_config(TOPICS.routes, {"message.timestamp.type": "CreateTime", "retention.ms": "1000"})
    found = check_topics(broker, TOPICS)
    assert sorted(statuses(found)) == ["ok", "problem", "warning"]
    assert "message.timestamp.type=LogAppendTime" in next(one.fix for one in found if one.status == "problem")


def test_the_brokers_clock(broker: MemoryBroker) -> None:
    ensure(broker.admin(), TOPICS)
    assert statuses(check_clock(broker, TOPICS)) == ["ok"]
    other = MemoryBroker(clock=ManualClock(int(time.time() * 1000) + 3_600_000))
    ensure(other.admin(), TOPICS)
    (found,) = check_clock(other, TOPICS)
    assert found.status == "warning"
    assert 3_000_000 < int(found.message.split("clock is ")[1].split(" ms")[0]) <= 3_600_000
    other.close()


def test_members(broker: MemoryBroker) -> None:
    assert statuses(check_members(broker, TOPICS)) == ["skipped"]
    ensure(broker.admin(), TOPICS)
    assert check_members(broker, TOPICS) == [Finding("members", "ok", "0 workers and 0 stores are live, 0 are gone")]
    announce(broker, "good", Lifecycle.RUNNING, ready=True)
    announce(broker, "old", Lifecycle.BEHIND, reason="the source is gone")
    announce(broker, "new", Lifecycle.STARTING)
    found = check_members(broker, TOPICS)
    assert [(one.status, one.message) for one in found] == [
        ("ok", "3 workers and 0 stores are live, 0 are gone"),
        ("warning", "new is not ready: it is starting"),
        ("warning", "old is BEHIND: the source is gone"),
    ]


def announce(
    broker: MemoryBroker, name: str, lifecycle: Lifecycle, ready: bool = False, reason: str | None = None
) -> None:
    state = WorkerState(lifecycle=lifecycle, tags={}, weights=Weights.VALID, version=None, run=None)
    member = MemberState(
        kind="worker", member_id=name, boot_id="b", state=state, ready=ready, since=0, applied=0, reason=reason
    )
    value, headers = encode_member(member)
    writer = broker.writer("w")
    writer.append(OutRecord(TOPICS.members, value, name.encode(), headers)).result(10)
    writer.close(1)


# -- the command


@pytest.fixture
def cli(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> MemoryCli:
    return MemoryCli(broker, "t", monkeypatch)


def test_the_command(broker: MemoryBroker, cli: MemoryCli) -> None:
    ran = cli.run("doctor", "--json")
    assert ran.code == 1
    by_check = {line["check"]: line["status"] for line in ran.lines}
    assert by_check == {
        "python": "ok", "packages": "ok", "settings": "ok", "journal": by_check["journal"], "broker": "ok",
        "topics": "problem", "clock": "skipped", "members": "skipped",
    }  # fmt: skip
    ensure(broker.admin(), TOPICS)
    ran = cli.run("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert "ok       clock     the broker's clock is" in ran.out


def test_a_fix_stands_below_its_finding(cli: MemoryCli) -> None:
    ran = cli.run("doctor")
    assert "problem  topics    t.routes.v1 does not exist\n" in ran.out
    assert "                   -> moebus --topic-prefix t topics ensure\n" in ran.out


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    bad = tmp_path / "moebus.toml"
    bad.write_text("topic_prefx = 'x'\n")
    ran = run_command("--config", str(bad), "doctor", "--json")
    assert ran.code == 1
    found = {line["check"]: line for line in ran.lines}
    assert "topic_prefx" in found["settings"]["message"]
    assert (found["journal"]["status"], found["broker"]["status"]) == ("skipped", "skipped")


@pytest.mark.parametrize("option", [("--engine", "vllm"), ("--engine-token-file", "/x")])
def test_options_of_an_engine_without_an_address(option: tuple[str, str]) -> None:
    ran = run_command("doctor", *option)
    assert ran.code == 2
    assert "--engine-url" in ran.err
