"""RoutingPublisher: takes the routes of finished requests and stores them in the log, off the caller's thread."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType

import numpy.typing as npt

from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.metrics import Metrics
from moebus.observability.settings import PublisherSettings, Settings, load_settings
from moebus.producers.routing.budget import ByteBudget
from moebus.producers.routing.errors import PublisherClosed, PublisherSuspended, RoutesDropped
from moebus.producers.routing.jobs import Wire, fence_job, rollout_job
from moebus.producers.routing.pipeline import Pipeline
from moebus.producers.routing.receipt import FenceReceipt, FenceStored, RoutingReceipt, Stored
from moebus.producers.routing.stats import Counters, PublisherStats
from moebus.producers.routing.submission import Submission, plan
from moebus.schemas.attempt import attempt_text, new_attempt, parse_attempt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Clear, Delete, Status
from moebus.schemas.rollout import check_epoch, check_prefix, check_run
from moebus.schemas.route_ref import RouteRef

CLOSE_SECONDS = 30.0


class RoutingPublisher:
    """Publishes routes from a thread of this process. Thread-safe; use it as a context manager.

    A wrong argument raises at once; a fault of the log never does: it is in the receipt. What waits for its
    acknowledgement is bounded by `options.max_bytes`; when full, `submit` waits up to `options.block_seconds`
    (`full="block"`) or drops at once (`full="drop"`), and the receipt fails with `RoutesDropped`.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        *,
        run: str,
        card: ModelCard | None,
        epoch: int = 0,
        options: PublisherSettings | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        owns_broker: bool = False,
    ) -> None:
        """`card`: the model's; None for one that only deletes and clears. `owns_broker`: `close` closes the broker too.
        `random_bytes(n)`: for attempt ids."""
        self.run = check_run(run)
        self.epoch = check_epoch(epoch)
        self.card = card
        self._options = options or PublisherSettings()
        self._clock: Clock = clock or SystemClock()
        self._random = random_bytes
        self._metrics = metrics or Metrics()
        self._counters = Counters(self._metrics)
        self._budget = ByteBudget(self._options.max_bytes, self._clock)
        self._broker = broker
        self._owns_broker = owns_broker
        self._admin = broker.admin()
        producer_id = f"{socket.gethostname()}-{os.getpid()}-{random_bytes(4).hex()}"
        self._wire = Wire(topics.routes, producer_id)
        timeout = self._options.receipt_timeout
        self._pipeline = Pipeline(broker.writer(f"moebus-routes-{producer_id}", receipt_timeout=timeout))
        self._suspended = False
        self._pid = os.getpid()

    @classmethod
    def from_settings(
        cls,
        *,
        card: ModelCard | None,
        run: str | None = None,
        epoch: int = 0,
        settings: Settings | None = None,
        metrics: Metrics | None = None,
    ) -> RoutingPublisher:
        """A publisher on the broker of the settings (default: environment and file). `run`: default the settings'.

        Raises:
            SettingsError: naming the setting.
        """
        from moebus.broker import open_broker

        found = settings or load_settings()
        return cls(
            open_broker(found.kafka),
            Topics(found.topic_prefix),
            run=run or found.run,
            card=card,
            epoch=epoch,
            options=found.publisher,
            metrics=metrics,
            owns_broker=True,
        )

    def submit(
        self,
        routes: npt.ArrayLike | None,
        rollout_id: str,
        choice: int = 0,
        *,
        group: str | None = None,
        start: int = 0,
        base: RouteRef | None = None,
        token_ids: npt.ArrayLike | None = None,
        prompt_rows: int | None = None,
        versions: Sequence[tuple[int, str]] = (),
        status: Status = "complete",
        finish_reason: str = "",
        attempt: str | None = None,
        traceparent: str | None = None,
    ) -> RoutingReceipt:
        """Takes the routes of one finished request. Copies the rows once; returns at once unless the buffer is full.

        Args:
            routes: integers [rows, moe_layers, top_k] as the card says; row i is what token i was routed to (global
                order of the card's layers). None only with status `missing`.
            rollout_id: with `choice`, the identity within the run.
            group: chooses the partition; default `data` of a structured id, else the id.
            start: row of the rollout that `routes[0]` is; above 0 only with a base.
            base: an earlier rollout of this run and group whose rows begin this one (all, or those of its prompt);
                only the rest is sent. Where the token hashes differ everything is sent and counted.
            token_ids: [n], n >= rows; needed with a base.
            prompt_rows: rows of the prompt, for the RouteRef and for later bases.
            versions: weight versions [(first row, version), ...].
            attempt: names an attempt again, to send the same content once more.

        Raises:
            InvalidInput (a ValueError): naming the argument.  PublisherClosed: after `close`.
        """
        if self.card is None:
            raise InvalidInput("card", "this publisher was made without a model card; it only deletes and clears")
        submission = plan(
            routes, rollout_id, run=self.run, card=self.card, epoch=self.epoch, attempt=self._attempt(attempt),
            now_ms=self._clock.now_ms(), choice=choice, group=group, start=start, base=base, token_ids=token_ids,
            prompt_rows=prompt_rows, versions=versions, status=status, finish_reason=finish_reason,
        )  # fmt: skip
        if submission.nbytes > self._options.max_bytes:
            raise InvalidInput(
                "routes", f"{submission.nbytes} bytes where the publisher may hold {self._options.max_bytes}"
            )
        if os.getpid() != self._pid:  # the thread that sends did not come along
            raise PublisherClosed(
                f"{submission.name}: this process was forked after the publisher was made; make one here"
            )
        self._pipeline.check_open(submission.name)
        future: Future[Stored] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel what may be on the wire
        receipt = RoutingReceipt(submission.ref, submission.name, future)
        self._counters.submitted(submission.base_refused)
        if self._suspended:
            self._counters.ended("suspended")
            future.set_exception(PublisherSuspended(f"{submission.name}: the publisher is suspended; nothing was sent"))
        elif self._room_for(submission):
            self._send(submission, self.card, traceparent, future)
        else:
            self._counters.ended("dropped")
            self._pipeline.note_failure()
            waiting = f"{self._budget.used} bytes of {self._options.max_bytes} wait for the log"
            future.set_exception(RoutesDropped(f"{submission.name}: nothing was sent, {waiting}"))
        return receipt

    def delete(self, prefix: str, *, epoch: int | None = None) -> FenceReceipt:
        """Removes every rollout that `prefix` covers (all choices, epochs up to `epoch`, default this publisher's),
        in every partition, and refuses late ones. Settles once all partitions have it; repeating it is harmless.

        Raises:
            InvalidInput: field `prefix` or `epoch`.  PublisherClosed: after `close`.
        """
        until = self.epoch if epoch is None else check_epoch(epoch)
        fence = Delete(self.run, check_prefix(prefix), self._attempt(None), until)
        return self._fence(fence, f"delete {self.run}/{prefix} epoch <= {until}")

    def clear(self, through_epoch: int) -> FenceReceipt:
        """Removes every rollout of the run in epochs up to `through_epoch` and refuses them for ever.

        Raises:
            InvalidInput: field `epoch`.  PublisherClosed: after `close`.
        """
        fence = Clear(self.run, check_epoch(through_epoch), self._attempt(None))
        return self._fence(fence, f"clear {self.run} epoch <= {through_epoch}")

    def suspend(self) -> None:
        """From now on `submit` sends nothing and its receipts fail with `PublisherSuspended`; deletes go on."""
        self._suspended = True

    def resume(self) -> None:
        """Undoes `suspend`."""
        self._suspended = False

    def flush(self, timeout: float = CLOSE_SECONDS) -> bool:
        """True: everything given to the publisher since the last flush is stored. False: `timeout` seconds passed
        first, or something failed or was dropped (its receipt says why). Not to be called from a receipt callback."""
        return self._pipeline.flush(timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> list[str]:
        """Takes nothing more and waits up to `timeout` seconds for what is under way. Returns what was given up, by
        name; those receipts fail. A second call returns []. Not to be called from a receipt callback."""
        self._budget.close()
        left = self._pipeline.close(timeout)
        self._admin.close()
        if self._owns_broker:
            self._broker.close()
        return left

    def stats(self) -> PublisherStats:
        """Counts since the start and what waits now."""
        return self._counters.now(len(self._pipeline.unsettled()), self._budget.used)

    def __enter__(self) -> RoutingPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attempt(self, text: str | None) -> bytes:
        return new_attempt(self._clock.now_ms(), self._random(10)) if text is None else parse_attempt(text)

    def _room_for(self, submission: Submission) -> bool:
        wait = self._options.block_seconds if self._options.full == "block" else 0.0
        taken = self._budget.take(submission.nbytes, wait)
        self._counters.buffer(self._budget.used)
        return taken

    def _send(self, submission: Submission, card: ModelCard, traceparent: str | None, future: Future[Stored]) -> None:
        started = self._clock.monotonic()

        def finish(error: Exception | None) -> None:
            self._budget.give(submission.nbytes)
            self._counters.buffer(self._budget.used)
            self._counters.ended("failed" if error else "stored")
            if error is None:
                self._metrics.observe("moebus_routes_publish_duration_seconds", self._clock.monotonic() - started)

        acknowledged = self._counters.acknowledged
        job = rollout_job(submission, card, self._wire, traceparent, future, finish, acknowledged)
        try:
            self._pipeline.put(job)
        except PublisherClosed as exc:  # closed while this call waited for room
            finish(exc)
            future.set_exception(exc)

    def _fence(self, fence: Delete | Clear, name: str) -> FenceReceipt:
        future: Future[FenceStored] = Future()
        future.set_running_or_notify_cancel()
        job = fence_job(fence, name, self._wire, self._admin, future, self._counters.acknowledged)
        self._pipeline.put(job)
        return FenceReceipt(attempt_text(fence.id), name, future)
