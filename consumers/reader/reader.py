"""RoutingReader: a trainer's way to the routes, by reference, by identity, or as a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Literal

import numpy.typing as npt

from moebus.broker.errors import BrokerUnavailable
from moebus.broker.partitioner import partition_for
from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.consumers.reader.ask import LOOKUP_SECONDS, Asker, Query
from moebus.consumers.reader.batch import RouteBatch, build_batch, check_tokens
from moebus.consumers.reader.checks import check_card, check_ref, shape_of
from moebus.consumers.reader.dense import RouteShard
from moebus.consumers.reader.directory import FixedStores, MembersDirectory, StoreDirectory
from moebus.consumers.reader.listing import Page, list_page
from moebus.consumers.reader.rollout import Rollout, check_rollout
from moebus.consumers.reader.shard import MegatronShard
from moebus.consumers.reader.sharded import Slice, build_shard, check_slice, shape_of_slices, slices_of
from moebus.consumers.reader.store_client import StoreClient
from moebus.consumers.reader.stream import RolloutStream, StreamOptions
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.metrics import Metrics
from moebus.observability.settings import Settings, load_settings
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import CheckLevel
from moebus.schemas.rollout import check_group, check_run, default_group, partition_key, rollout_key
from moebus.schemas.route_errors import (
    AmbiguousAttempt,
    RouteCorrupt,
    RouteDeleted,
    RouteError,
    RouteNeverComing,
    RouteNotYet,
)
from moebus.schemas.route_ref import RouteRef

FETCHERS = 8
"""Requests to stores at the same time."""
_MASKABLE = (RouteNotYet, RouteNeverComing, RouteDeleted, RouteCorrupt)


class RoutingReader:
    """Thread-safe; use it as a context manager. Streams that `rollouts` opened end with it."""

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        *,
        run: str,
        card: ModelCard | None = None,
        stores: Sequence[str] | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        owns_broker: bool = False,
        checks: CheckLevel = "ids",
    ) -> None:
        """`card`: what every rollout has to fit. `stores`: URLs; without them stores are found in the members topic.
        `checks`: how closely rows are looked at. `owns_broker`: `close` closes the broker too."""
        self.run = check_run(run)
        self.card = card
        self.checks: CheckLevel = checks
        self._broker = broker
        self._topics = topics
        self._owns_broker = owns_broker
        self._metrics = metrics or Metrics()
        self._clock: Clock = clock or SystemClock()
        self._client = StoreClient(checks=checks)
        self._directory: StoreDirectory = (
            MembersDirectory(broker, topics.members, self._clock) if stores is None else FixedStores(stores)
        )
        self._fixed = stores is not None  # whoever named the stores may have no broker to ask
        self._asker = Asker(self._directory, self._client.get, self._clock, time.sleep)
        self._looker = Asker(self._directory, self._client.head, self._clock, time.sleep)
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="moebus-resolve")
        self._partitions: int | None = None
        self._lock = threading.Lock()
        self._streams: list[RolloutStream] = []

    @classmethod
    def from_settings(
        cls,
        *,
        run: str | None = None,
        card: ModelCard | None = None,
        stores: Sequence[str] | None = None,
        settings: Settings | None = None,
        metrics: Metrics | None = None,
    ) -> RoutingReader:
        """A reader on the broker of the settings (default: environment and file). `run`: default the settings'.

        Raises:
            SettingsError: naming the setting.
        """
        from moebus.broker import open_broker

        found = settings or load_settings()
        return cls(
            open_broker(found.kafka), Topics(found.topic_prefix), run=run or found.run, card=card, stores=stores,
            metrics=metrics, owns_broker=True, checks=found.reader.checks,
        )  # fmt: skip

    def resolve(
        self,
        refs: Sequence[RouteRef],
        tokens: Sequence[npt.ArrayLike] | None = None,
        *,
        wait: float = 0.0,
        missing: Literal["raise", "mask"] = "raise",
        layers: Sequence[int] | None = None,
    ) -> RouteBatch:
        """The routes of all `refs`, packed in their order.

        Args:
            tokens: per ref its token ids [n], n >= rows; the batch then has n rows for it, and the token hash is
                checked. Without them the batch has the recorded rows.
            wait: seconds, for all together, until what is not there yet must be.
            missing: "mask": a rollout that is not to be had (not yet, never, deleted, corrupt) becomes rows that are
                not valid, listed in `absent`. An unreachable store always raises.
            layers: global layer numbers to read (default: all); only they are transferred.

        Raises:
            InvalidInput: fields `refs`, `tokens` (another hash), `layers`.
            RouteError: its subclasses, of the first ref in order that fails.
            BrokerUnavailable: the stores could not be looked up.
        """
        started = self._clock.monotonic()
        self._of_this_run(refs)
        lengths = None if tokens is None else check_tokens(refs, tokens)
        wanted = None if layers is None else tuple(layers)
        distinct = list(dict.fromkeys(refs))
        answers = dict(
            zip(distinct, self._pool.map(lambda ref: self._try(ref, started + wait, wanted), distinct), strict=True)
        )
        found = [answers[ref] for ref in refs]
        for one in found:
            if isinstance(one, RouteError) and not (missing == "mask" and isinstance(one, _MASKABLE)):
                raise one
        batch = build_batch(refs, found, shape_of(found, wanted, self.card), lengths)
        self._metrics.observe("moebus_reader_resolve_duration_seconds", self._clock.monotonic() - started)
        return batch

    def resolve_shard(
        self,
        refs: Sequence[RouteRef],
        shard: MegatronShard,
        tokens: Sequence[npt.ArrayLike] | None = None,
        *,
        wait: float = 0.0,
        layers: Sequence[int] | None = None,
    ) -> RouteShard:
        """What `resolve(refs, tokens, layers=layers).shard(shard)` gives, transferring only the rows of this rank.
        What is missing raises. Padding and rows without routes may be filled with other ids than there.

        Raises:
            InvalidInput, RouteError, BrokerUnavailable: as `resolve`.
        """
        self._of_this_run(refs)
        deadline = self._clock.monotonic() + wait
        lengths = [ref.rows for ref in refs] if tokens is None else check_tokens(refs, tokens)
        wanted = None if layers is None else tuple(layers)
        rows = shard.rows(lengths)
        pieces = slices_of(rows, refs, lengths)
        if not pieces and self.card is None:  # nothing for this rank; somebody has to say what the model is
            pieces = [Slice(index, 0, 0) for index, ref in enumerate(refs) if ref.rows][:1]

        def read(piece: Slice) -> Rollout:
            query = replace(self._query(refs[piece.index], wanted), start=piece.start, stop=piece.stop)
            left = max(0.0, deadline - self._clock.monotonic())
            try:
                return check_slice(self._counted(query, left), refs[piece.index], piece)
            except InvalidInput as exc:
                if exc.field != "stop":
                    raise
                raise RouteCorrupt(f"{refs[piece.index].key} has fewer rows than the ref says: {exc.reason}") from exc

        found = list(self._pool.map(read, pieces))
        shape = shape_of_slices(found, wanted, self.card)
        return build_shard(rows, lengths, list(zip(pieces, found, strict=True)), shard, shape)

    def get(
        self,
        rollout_id: str,
        choice: int = 0,
        attempt: str | None = None,
        *,
        group: str | None = None,
        wait: float = 0.0,
        layers: Sequence[int] | None = None,
        start: int = 0,
        stop: int | None = None,
        min_offset: int | None = None,
    ) -> Rollout:
        """One rollout of any status, by identity: stores are asked for every partition, or for that of `group` alone.

        `attempt`: which one, where there are several. `start`, `stop`: rows. `min_offset`: answer only once the store
        has read the partition of the group (default: that of the id) up to there (`Stored.end.offset + 1`).

        Raises:
            InvalidInput: naming the argument.  RouteError: its subclasses.  BrokerUnavailable.
        """
        rollout_key(self.run, rollout_id, choice)
        wanted = None if layers is None else tuple(layers)
        partition = None
        if group is not None or min_offset is not None:
            partition = self._partition(default_group(rollout_id) if group is None else check_group(group))
        query = Query(self.run, rollout_id, choice, attempt, wanted, start, stop, min_offset, partition)
        return self._counted(query, wait)

    def exists(self, rollout_id: str, choice: int = 0, attempt: str | None = None) -> bool:
        """Whether a whole rollout is there now.

        Raises:
            RouteError: StoreCatchingUp, StoreUnreachable where that cannot be said.  BrokerUnavailable.
        """
        try:
            self._looker.get(Query(self.run, rollout_id, choice, attempt), 0.0)
        except AmbiguousAttempt:
            return True
        except _MASKABLE:
            return False
        return True

    def page(self, prefix: str | None = None, *, limit: int = 1000, after: str | None = None) -> Page:
        """Whole attempts of any status that the stores hold, below `prefix` (None: of the whole run), at most `limit`
        (up to 10,000). `after`: the cursor that the page before gave.

        Raises:
            InvalidInput: naming the argument.  RouteError: StoreCatchingUp, StoreUnreachable.  BrokerUnavailable.
        """
        stores = self._directory.stores(LOOKUP_SECONDS)
        return list_page(
            stores, lambda url, cursor, most: self._client.page(url, self.run, prefix, cursor, most), after, limit
        )

    def rollouts(
        self, group: str, *, idle_timeout: float | None = None, options: StreamOptions | None = None
    ) -> RolloutStream:
        """Whole rollouts of status complete straight from Kafka, as a member of consumer group `group`.

        At least once: what was not acknowledged comes again after a restart or a rebalance. `idle_timeout`: the
        iteration ends after so many seconds without a rollout (None: never).
        """
        stream = RolloutStream(
            self._broker, self._topics.routes, run=self.run, group=group, idle_timeout=idle_timeout,
            bases=self._base, check_card=lambda one: check_card(one, self.card),
            options=options or StreamOptions(checks=self.checks), metrics=self._metrics,
            clock=self._clock, on_close=self._forget,
        )  # fmt: skip
        with self._lock:
            self._streams.append(stream)
        return stream

    def close(self) -> None:
        """Ends the streams (their acknowledged offsets are committed) and the connections."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        self._pool.shutdown(cancel_futures=True)
        self._directory.close()
        self._client.close()
        if self._owns_broker:
            self._broker.close()

    def __enter__(self) -> RoutingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget(self, stream: RolloutStream) -> None:
        with self._lock:
            self._streams.remove(stream)

    def _of_this_run(self, refs: Sequence[RouteRef]) -> None:
        for ref in refs:
            if ref.run != self.run:
                raise InvalidInput("refs", f"{ref.key} is of another run than {self.run}")

    def _try(self, ref: RouteRef, deadline: float, layers: tuple[int, ...] | None) -> Rollout | RouteError:
        wait = max(0.0, deadline - self._clock.monotonic())
        try:
            return check_ref(self._counted(self._query(ref, layers), wait), ref)
        except RouteError as exc:
            return exc

    def _base(self, ref: RouteRef, wait: float) -> Rollout:
        return self._asker.get(self._query(ref, None), wait)

    def _query(self, ref: RouteRef, layers: tuple[int, ...] | None) -> Query:
        partition = None if self._fixed else self._partition(ref.effective_group)
        wanted = layers if ref.rows else None  # without a row there is no layer to ask for
        return Query(ref.run, ref.rollout_id, ref.choice, ref.attempt, wanted, partition=partition)

    def _partition(self, group: str) -> int | None:
        """Where a group lies, so that only its store is asked; None where that cannot be said now."""
        if self._partitions is None:
            admin = self._broker.admin()
            try:
                info = admin.describe([self._topics.routes]).get(self._topics.routes)
            except BrokerUnavailable:
                return None
            finally:
                admin.close()
            if info is None:
                return None
            self._partitions = info.partitions
        return partition_for(partition_key(self.run, group), self._partitions)

    def _counted(self, query: Query, wait: float) -> Rollout:
        try:
            rest: CheckLevel = "full" if self.checks == "full" else "off"  # the client has looked at the ids
            found = check_card(check_rollout(self._asker.get(query, wait), rest), self.card)
        except RouteError as exc:
            self._metrics.inc("moebus_reader_resolved_total", outcome=exc.name)
            raise
        self._metrics.inc("moebus_reader_resolved_total", outcome="found")
        return found
