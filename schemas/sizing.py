"""How much a run's routes are: bytes, records, partitions, disk, seconds. Arithmetic only, nothing is asked."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record.layout import TARGET_CHUNK_BYTES

RECORD_OVERHEAD = 200
"""Bytes of a record beside its rows: header, layer numbers, Kafka's own framing."""
PARTITION_BYTES_A_SECOND = 25e6
"""What one partition is given at most, so that one store that lags a little still catches up."""
MIN_PARTITIONS = 8


@dataclass(frozen=True, slots=True)
class Rates:
    """MB/s (10^6) of one process each, as measured on two cores of a shared machine with one broker.

    `publish`: a publisher, acks from all replicas. `ingest`: a store, committed with fsync. `read`: a trainer's reader
    from one store.
    """

    publish: float = 170.0
    ingest: float = 80.0
    read: float = 150.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """What serves the run. `publishers`: engines that send at the same time. `stores`: shares of the partitions.
    `step_seconds`: from one step to the next. Times that data is kept: seconds."""

    publishers: int = 8
    stores: int = 1
    replication: int = 3
    step_seconds: float = 300.0
    log_seconds: float = 48 * 3600.0
    store_seconds: float = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Sizes in bytes. `wire`: as sent, an estimate where experts are chosen evenly; real routes pack no worse.

    `log_disk`: of all brokers together. `store_disk`: of one full copy. `busy`: publishers, stores and readers work at
    the same time, so a step's routes are there after the slowest of the three.
    """

    token: int
    rollout: int
    rollout_wire: int
    rollout_records: int
    step: int
    step_wire: int
    step_records: int
    partitions: int
    log_disk: int
    store_disk: int
    publish_seconds: float
    ingest_seconds: float
    read_seconds: float
    step_seconds: float
    keeps_up: bool

    def as_dict(self) -> dict[str, int | float | bool]:
        return asdict(self)


def plan_routes(
    card: ModelCard,
    rollouts: int,
    tokens: int,
    deployment: Deployment | None = None,
    rates: Rates | None = None,
) -> RoutePlan:
    """`rollouts` a step, each of `tokens` tokens, prompt included (so `tokens - 1` rows).

    Raises:
        InvalidInput: naming the number that makes no sense.
    """
    where, speed = deployment or Deployment(), rates or Rates()
    _positive("rollouts", rollouts)
    _positive("tokens", tokens)
    for name, value in (asdict(where) | asdict(speed)).items():
        _positive(name, value)
    token = len(card.moe_layers) * card.top_k * card.dtype.itemsize
    if token > TARGET_CHUNK_BYTES:
        raise InvalidInput("model", f"one row has {token} bytes; at most {TARGET_CHUNK_BYTES} fit a record")
    rows = tokens - 1
    records = -(-rows // (TARGET_CHUNK_BYTES // token)) + 1
    rollout = rows * token
    wire = math.ceil(rollout * packed_fraction(card)) + records * RECORD_OVERHEAD
    step_wire = rollouts * wire
    flow = step_wire / where.step_seconds
    publish = step_wire / (speed.publish * 1e6 * where.publishers)
    ingest = step_wire / (speed.ingest * 1e6 * where.stores)
    read = rollouts * rollout / (speed.read * 1e6 * where.stores)
    busy = max(publish, ingest, read)
    return RoutePlan(
        token=token, rollout=rollout, rollout_wire=wire, rollout_records=records, step=rollouts * rollout,
        step_wire=step_wire, step_records=rollouts * records,
        partitions=max(MIN_PARTITIONS, where.stores, _up_to(math.ceil(flow / PARTITION_BYTES_A_SECOND), 8)),
        log_disk=math.ceil(flow * where.log_seconds) * where.replication,
        store_disk=math.ceil(flow * where.store_seconds),
        publish_seconds=publish, ingest_seconds=ingest, read_seconds=read, step_seconds=busy,
        keeps_up=busy <= where.step_seconds,
    )  # fmt: skip


def packed_fraction(card: ModelCard) -> float:
    """What zstd leaves of evenly chosen ids: about their information, log2(experts) bits an id."""
    return max(1.0, math.log2(card.num_experts)) / (8 * card.dtype.itemsize)


def _up_to(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not value > 0 or math.isinf(value):
        raise InvalidInput(name, f"{value!r} is not a number above 0")
