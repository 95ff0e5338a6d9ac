"""Checks of the log: the broker, the topics, its clock, who is there."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as NotYet

from moebus.broker.ports import Broker, OutRecord
from moebus.broker.topics import ROUTES, TopicReport, Topics, ensure
from moebus.cli._doctor import Finding
from moebus.producers.control import ControlClient, MemberView
from moebus.schemas.errors import MoebusError
from moebus.schemas.responses import Lifecycle

BROKER_S = 5.0
_PROBE_KEY = b"clock/probe"
"""As every controller does to learn the time: one key, so that compaction keeps one record of all."""
MAX_SKEW_MS = 5_000
_FATAL = frozenset(("message.timestamp.type", "partitions", "cleanup.policy"))
"""Settings of a topic without which something breaks; the others only cost space or time."""
_UP = "moebus broker up, or export MOEBUS_KAFKA__BOOTSTRAP_SERVERS=HOST:PORT of the one there is"


def check_broker(broker: Broker, where: str) -> list[Finding]:
    admin = broker.admin()
    try:
        cluster, count = admin.cluster_id(BROKER_S), admin.broker_count(BROKER_S)
    except MoebusError as error:
        return [Finding("broker", "problem", str(error), _UP)]
    finally:
        admin.close()
    return [Finding("broker", "ok", f"Kafka at {where}: cluster {cluster}, brokers {count}")]


def check_topics(broker: Broker, topics: Topics) -> list[Finding]:
    admin = broker.admin()
    try:
        there = admin.describe([topics.routes], BROKER_S)
        partitions = there[topics.routes].partitions if topics.routes in there else ROUTES.partitions
        reports = ensure(admin, topics, dry_run=True, routes_partitions=partitions, timeout=BROKER_S)
    finally:
        admin.close()
    findings = [found for report in reports for found in _topic(report, topics.prefix)]
    right = sum(report.status == "ok" for report in reports)
    if right:
        findings.append(Finding("topics", "ok", f"{right} of {len(reports)} topics are as defined"))
    return findings


def _topic(report: TopicReport, prefix: str) -> list[Finding]:
    if report.status == "missing":
        fix = f"moebus --topic-prefix {prefix} topics ensure"
        return [Finding("topics", "problem", f"{report.name} does not exist", fix)]
    return [
        Finding(
            "topics", "problem" if one.setting in _FATAL else "warning", f"{report.name}: {one}",
            "make the topic anew" if one.setting == "partitions"
            else f"kafka-configs.sh --alter --topic {report.name} --add-config {one.setting}={one.wanted}",
        )
        for one in report.differences
    ]  # fmt: skip


def check_clock(broker: Broker, topics: Topics) -> list[Finding]:
    """Appends an empty record under a key that is no member's: its ack carries the broker's time."""
    writer = broker.writer("moebus-doctor", receipt_timeout=BROKER_S)
    try:
        before = time.time()
        receipt = writer.append(OutRecord(topics.members, None, _PROBE_KEY))
        stamp = receipt.result(BROKER_S).timestamp_ms
        after = time.time()
    except (MoebusError, NotYet) as error:
        text = f"nothing could be appended to {topics.members}: {error or 'no acknowledgement'}"
        return [Finding("clock", "problem", text, "look at the broker's ACLs and at min.insync.replicas")]
    finally:
        writer.close(0.0)
    skew = stamp - int((before + after) / 2 * 1000)
    around = int((after - before) / 2 * 1000) + 1
    text = f"the broker's clock is {skew:+d} ms from this machine's (+- {around} ms)"
    if abs(skew) - around > MAX_SKEW_MS:
        fix = "set both clocks by NTP; deadlines go by the broker's, logs and metrics by this machine's"
        return [Finding("clock", "warning", text, fix)]
    return [Finding("clock", "ok", text)]


def check_members(broker: Broker, topics: Topics) -> list[Finding]:
    admin = broker.admin()
    try:
        there = topics.members in admin.describe([topics.members], BROKER_S)
    finally:
        admin.close()
    if not there:
        return [Finding("members", "skipped", f"not looked at: {topics.members} does not exist")]
    with ControlClient(broker, topics) as client:
        views = client.members()
    live = [view for view in views if view.live]
    counts = {kind: sum(view.state.kind == kind for view in live) for kind in ("worker", "store")}
    text = f"{counts['worker']} workers and {counts['store']} stores are live, {len(views) - len(live)} are gone"
    return [Finding("members", "ok", text), *[found for view in live for found in _member(view)]]


def _member(view: MemberView) -> list[Finding]:
    member, state = view.state, view.state.state
    if state is not None and state.lifecycle in (Lifecycle.TAINTED, Lifecycle.BEHIND):
        text = f"{view.member_id} is {state.lifecycle}: {member.reason or 'no reason given'}"
        return [Finding("members", "warning", text, "moebus control update-weights brings it back")]
    if member.kind == "worker" and not member.ready:
        text = f"{view.member_id} is not ready: {member.reason or 'it is starting'}"
        return [Finding("members", "warning", text, f"moebus workers {view.member_id}")]
    return []
