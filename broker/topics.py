"""The topics of one fleet in one table, and `ensure`, which creates and checks them.

`ensure` never deletes a topic, never changes a partition count and never changes a setting of a topic that
exists: what differs is reported and left to the operator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moebus.broker.ports import LogAdmin, TopicInfo
from moebus.schemas.errors import SettingsError

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_APPEND_TIME = {"message.timestamp.type": "LogAppendTime"}
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """One row of the table. `suffix` follows the prefix and a dot; `exact`: any other partition count is drift."""

    suffix: str
    partitions: int
    exact: bool
    config: Mapping[str, str]

    @property
    def compacted(self) -> bool:
        return "compact" in self.config["cleanup.policy"]


def _deleted(retention_ms: int) -> dict[str, str]:
    return {**_APPEND_TIME, "cleanup.policy": "delete", "retention.ms": str(retention_ms), "retention.bytes": "-1"}


def _compacted(retention_ms: int) -> dict[str, str]:
    return {**_deleted(retention_ms), "cleanup.policy": "compact,delete"}


CONTROL_REQUESTS = TopicSpec("control.requests.v1", 1, True, _deleted(-1))
CONTROL_RESPONSES = TopicSpec("control.responses.v1", 1, False, _deleted(30 * _DAY_MS))
MEMBERS = TopicSpec(
    "members.v1", 1, False,
    {
        **_compacted(30 * _DAY_MS),
        "segment.bytes": str(16 << 20),
        "segment.ms": str(10 * 60_000),
        "min.cleanable.dirty.ratio": "0.1",
    },
)  # fmt: skip
ROUTES = TopicSpec("routes.v1", 8, True, _deleted(48 * _HOUR_MS))
DLT = TopicSpec("dlt.v1", 1, False, _compacted(30 * _DAY_MS))
TABLE: tuple[TopicSpec, ...] = (CONTROL_REQUESTS, CONTROL_RESPONSES, MEMBERS, ROUTES, DLT)
_COMPACTED_ENDS = tuple(f".{spec.suffix}" for spec in TABLE if spec.compacted)


def is_compacted(topic: str) -> bool:
    """Whether the table says so of this full name, whatever its prefix."""
    return topic.endswith(_COMPACTED_ENDS)


@dataclass(frozen=True, slots=True)
class Topics:
    """The full names of one fleet's topics.

    Raises:
        SettingsError: a prefix that is not 1 to 200 of `[A-Za-z0-9._-]` (no dot first, none last).
    """

    prefix: str = "moebus"

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix) or self.prefix.endswith("."):
            raise SettingsError(
                f"topic prefix {self.prefix!r}: 1 to 200 of A-Z a-z 0-9 . _ - are needed, no dot first or last"
            )

    def name(self, spec: TopicSpec) -> str:
        return f"{self.prefix}.{spec.suffix}"

    @property
    def control_requests(self) -> str:
        return self.name(CONTROL_REQUESTS)

    @property
    def control_responses(self) -> str:
        return self.name(CONTROL_RESPONSES)

    @property
    def members(self) -> str:
        return self.name(MEMBERS)

    @property
    def routes(self) -> str:
        return self.name(ROUTES)

    @property
    def dlt(self) -> str:
        return self.name(DLT)

    def names(self) -> tuple[str, ...]:
        """Every name, in the order of the table."""
        return tuple(self.name(spec) for spec in TABLE)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting of an existing topic that is not what the table says."""

    setting: str
    wanted: str
    found: str

    def __str__(self) -> str:
        text = f"{self.setting} is {self.found}, the table says {self.wanted}"
        return f"{text} (a partition count is never changed here)" if self.setting == "partitions" else text


Status = Literal["created", "ok", "drift", "missing"]


@dataclass(frozen=True, slots=True)
class TopicReport:
    """What `ensure` found or did for one topic. `missing` appears on a dry run only."""

    name: str
    status: Status
    partitions: int
    differences: tuple[Difference, ...] = ()

    @property
    def drift(self) -> tuple[str, ...]:
        """One sentence for each setting that differs."""
        return tuple(str(difference) for difference in self.differences)

    def as_dict(self) -> dict[str, object]:
        """For `--json`: name, status, partitions, differences (setting, wanted, found)."""
        found = [{"setting": d.setting, "wanted": d.wanted, "found": d.found} for d in self.differences]
        return {"topic": self.name, "status": self.status, "partitions": self.partitions, "differences": found}


def ensure(
    admin: LogAdmin, topics: Topics, dry_run: bool = False, routes_partitions: int = 8, timeout: float = 10.0
) -> list[TopicReport]:
    """Creates the topics that are missing (not on a dry run) and compares the others with the table.

    `routes_partitions`: partitions of the routes topic; `timeout`: seconds for each request.

    Raises:
        SettingsError: `routes_partitions` below 1.  BrokerUnavailable: no answer in time.
    """
    if routes_partitions < 1:
        raise SettingsError(f"routes_partitions {routes_partitions}: at least 1 is needed")
    brokers = admin.broker_count(timeout)
    found = admin.describe(topics.names(), timeout)
    reports = []
    for spec in TABLE:
        name = topics.name(spec)
        partitions = routes_partitions if spec is ROUTES else spec.partitions
        replication, config = _placement(spec, brokers)
        if name in found:
            reports.append(_compare(found[name], spec, partitions, replication, config))
        elif dry_run:
            reports.append(TopicReport(name, "missing", partitions))
        elif admin.create(name, partitions=partitions, replication=replication, config=config, timeout=timeout):
            reports.append(TopicReport(name, "created", partitions))
        else:  # somebody else made it in the meantime
            info = admin.describe([name], timeout)[name]
            reports.append(_compare(info, spec, partitions, replication, config))
    return reports


def _placement(spec: TopicSpec, brokers: int) -> tuple[int, dict[str, str]]:
    if brokers >= 3:
        return 3, {**spec.config, "min.insync.replicas": "2"}
    return 1, dict(spec.config)


def _compare(
    info: TopicInfo, spec: TopicSpec, partitions: int, replication: int, config: Mapping[str, str]
) -> TopicReport:
    differences = []
    if spec.exact and info.partitions != partitions:
        differences.append(Difference("partitions", str(partitions), str(info.partitions)))
    if info.replication < replication:
        differences.append(Difference("replication", str(replication), str(info.replication)))
    for setting, wanted in config.items():
        value = info.config.get(setting, "unknown")
        if _normal(value) != _normal(wanted):
            differences.append(Difference(setting, wanted, value))
    return TopicReport(info.name, "drift" if differences else "ok", info.partitions, tuple(differences))


def _normal(value: str) -> tuple[str, ...]:
    return tuple(sorted(part.strip() for part in value.split(",")))
