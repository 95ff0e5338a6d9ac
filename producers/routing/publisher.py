"""RoutingPublisher: takes the routes of finished requests and stores them in the log, off the caller's thread."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Literal

import numpy.typing as npt

from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.engine.answers.payload import Layers
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.metrics import Metrics
from moebus.observability.settings import PublisherSettings, Settings
from moebus.producers.routing.errors import NotSampled, PublisherClosed, PublisherSuspended, RoutesDropped
from moebus.producers.routing.high_water import HighWater, OnHighWater
from moebus.producers.routing.jobs import Wire
from moebus.producers.routing.parcel import Parcel, Sent
from moebus.producers.routing.receipt import FenceReceipt, FenceStored, RoutingReceipt, Stored
from moebus.producers.routing.responses import Answer, ResponseReceipts, submissions
from moebus.producers.routing.sender import Sender, ThreadSender
from moebus.producers.routing.stats import Counters, PublisherStats
from moebus.producers.routing.submission import Submission, plan, sampled
from moebus.schemas.attempt import attempt_text, new_attempt, parse_attempt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Clear, Delete, Status
from moebus.schemas.rollout import check_epoch, check_prefix, check_run
from moebus.schemas.route_ref import RouteRef

CLOSE_SECONDS = 30.0
Mode = Literal["auto", "process", "thread"]
MakeSender = Callable[[Wire, PublisherSettings, Clock, Metrics, Counters, Callable[[int], None]], Sender]
"""(wire, options, clock, metrics, counters, told of the bytes that wait) -> the sender."""


class RoutingPublisher:
    """Publishes routes. Thread-safe; use it as a context manager.

    Made with a broker it sends from a thread of this process; `from_settings` lets a process of its own send, where
    it can. A wrong argument raises at once; a fault of the log never does: it is in the receipt. What waits for its
    acknowledgement is bounded by `options.max_bytes`; when full, `submit` waits up to `options.block_seconds`
    (`full="block"`) or drops at once (`full="drop"`), and the receipt fails with `RoutesDropped`.
    """

    def __init__(
        self,
        broker: Broker | None,
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
        make_sender: MakeSender | None = None,
        on_high_water: OnHighWater | None = None,
    ) -> None:
        """`card`: the model's; None for one that only deletes and clears. `owns_broker`: `close` closes the broker too.
        `random_bytes(n)`: for attempt ids. `make_sender`: who sends, instead of a thread with `broker`.
        `on_high_water(used, limit)`: called on a thread of its own when `options.high_water` of the bound is in use,
        and again only after it fell to three quarters of that."""
        self.run = check_run(run)
        self.epoch = check_epoch(epoch)
        self.card = card
        self._options = options or PublisherSettings()
        self._clock: Clock = clock or SystemClock()
        self._random = random_bytes
        self._metrics = metrics or Metrics()
        self._counters = Counters(self._metrics)
        self._broker = broker if owns_broker else None
        wire = Wire(topics.routes, f"{socket.gethostname()}-{os.getpid()}-{random_bytes(4).hex()}")
        self._high_water: HighWater | None = None
        if make_sender is not None:
            self._sender = make_sender(wire, self._options, self._clock, self._metrics, self._counters, self._on_used)
        elif broker is not None:
            self._sender = ThreadSender(broker, wire, self._options, self._clock, self._on_used)
        else:
            raise InvalidInput("broker", "one is needed to send from a thread of this process")
        if on_high_water is not None:
            self._high_water = HighWater(self._sender.limit, self._options.high_water, on_high_water)
        self._suspended = False
        self._pid = os.getpid()

    @classmethod
    def from_settings(
        cls,
        *,
        card: ModelCard | None,
        run: str | None = None,
        epoch: int = 0,
        mode: Mode | None = None,
        settings: Settings | None = None,
        metrics: Metrics | None = None,
        on_high_water: OnHighWater | None = None,
    ) -> RoutingPublisher:
        """A publisher on the broker of the settings (default: environment and file). `run`: default the settings'.

        `mode` (default `publisher.mode`): `process` = a child process sends, with a journal between; `thread` = a
        thread of this process; `auto` = process where it is possible, else thread and a line in the log.

        Raises:
            SettingsError: naming the setting, or why there can be no process of its own.
        """
        from moebus.producers.routing.opening import open_publisher

        return open_publisher(
            cls, card=card, run=run, epoch=epoch, mode=mode, settings=settings, metrics=metrics,
            on_high_water=on_high_water,
        )  # fmt: skip

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
            InvalidInput (a ValueError): naming the argument; that an expert is twice in a top-k, the receipt says.
            PublisherClosed: after `close`, and in a process that was forked after this publisher was made.
        """
        submission = plan(
            routes, rollout_id, run=self.run, card=self._model(), epoch=self.epoch, attempt=self._attempt(attempt),
            now_ms=self._clock.now_ms(), choice=choice, group=group, start=start, base=base, token_ids=token_ids,
            prompt_rows=prompt_rows, versions=versions, status=status, finish_reason=finish_reason,
        )  # fmt: skip
        self._check_process(submission.name)
        self._sender.check_open(submission.name)
        send = self._sender.prepare(Parcel.of(submission, self._clock.now_ms(), traceparent))
        future: Future[Stored] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel what may be on the wire
        receipt = RoutingReceipt(submission.ref, submission.name, future)
        self._counters.submitted(submission.base_refused)
        self._metrics.inc("moebus_routes_bases_refused_total", int(submission.base_refused))
        if self._suspended:
            self._counters.ended("suspended")
            future.set_exception(PublisherSuspended(f"{submission.name}: the publisher is suspended; nothing was sent"))
        elif not sampled(submission.header.run, submission.header.group, self._options.sample):
            self._counters.ended("skipped")
            share = f"publisher.sample = {self._options.sample}"
            future.set_exception(NotSampled(f"{submission.name}: its group is not sampled ({share}); nothing was sent"))
        elif not send(self._on_rollout(submission, future)):
            self._counters.ended("dropped")
            self._sender.note_failure()
            waiting = f"{self._sender.used} bytes of {self._sender.limit} wait for the log"
            future.set_exception(RoutesDropped(f"{submission.name}: nothing was sent, {waiting}"))
        return receipt

    def publish_response(
        self,
        engine: str,
        response: object,
        rollout_id: str | None = None,
        *,
        choice: int | None = None,
        group: str | None = None,
        start: int = 0,
        base: RouteRef | None = None,
        prompt_token_ids: npt.ArrayLike | None = None,
        versions: Sequence[tuple[int, str]] | None = None,
        status: Status | None = None,
        layers: Layers | None = None,
        traceparent: str | None = None,
    ) -> ResponseReceipts:
        """Decodes an answer of another engine's server and submits each of its choices: `docs/answers.md`.

        Args:
            engine: whose answer it is: `fastdeploy`, `vllm` or `sglang`.
            response: the answer: an object, its JSON text, or `RouteStream.response()` of a streamed one.
            rollout_id: default what was sent as `user`, which FastDeploy alone repeats (in its request id).
            choice: number of the only choice (a request of one sample); default the index in the answer.
            start: the first row that was asked for; with it, and where rows came out of a cache, a base is needed.
            prompt_token_ids: [n] what was sent; where the answer does not repeat it.
            versions: as for `submit`; default what the answer says.
            status: default by the finish reason: complete, aborted (its routes are kept) or partial (no known end). An
                answer without routes is `missing`, whatever is said here.
            layers: which layers the server counts (`all`, `moe`), where the size alone cannot tell.

        Raises:
            InvalidInput (a ValueError): naming the argument or the field of the answer; nothing of it was submitted.
            PublisherClosed: as `submit`.
        """
        answer = Answer(
            engine, response, rollout_id, choice, start, base, prompt_token_ids, versions, status, layers
        )  # fmt: skip
        planned = submissions(answer, self._model())
        return ResponseReceipts([self.submit(**one, group=group, traceparent=traceparent) for one in planned])

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
        self._check_process("flush")
        return self._sender.flush(timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> list[str]:
        """Takes nothing more and waits up to `timeout` seconds for what is under way. Returns what was given up, by
        name; those receipts fail. A second call returns []. Not to be called from a receipt callback."""
        if os.getpid() != self._pid:
            return []  # a fork owns nothing of it
        left = self._sender.close(timeout)
        if self._high_water is not None:
            self._high_water.close()
        if self._broker is not None:
            self._broker.close()
        return left

    def stats(self) -> PublisherStats:
        """Counts since the start and what waits now."""
        return self._counters.now(len(self._sender.unsettled()), self._sender.used)

    def problem(self) -> str | None:
        """None while it can send, else what is wrong: a check for `Health.add_ready`."""
        return self._sender.problem()

    def __enter__(self) -> RoutingPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _model(self) -> ModelCard:
        if self.card is None:
            raise InvalidInput("card", "this publisher was made without a model card; it only deletes and clears")
        return self.card

    def _attempt(self, text: str | None) -> bytes:
        return new_attempt(self._clock.now_ms(), self._random(10)) if text is None else parse_attempt(text)

    def _check_process(self, name: str) -> None:
        if os.getpid() != self._pid:  # threads and pipes did not come along
            raise PublisherClosed(f"{name}: this process was forked after the publisher was made; make one here")

    def _on_used(self, used: int) -> None:
        self._counters.buffer(used)
        if self._high_water is not None:
            self._high_water.note(used)

    def _on_rollout(self, submission: Submission, future: Future[Stored]) -> Callable[[Sent | Exception], None]:
        started = self._clock.monotonic()

        def settle(outcome: Sent | Exception) -> None:
            if isinstance(outcome, Exception):
                self._counters.ended("dropped" if isinstance(outcome, RoutesDropped) else "failed")
                future.set_exception(outcome)
                return
            self._counters.ended("stored")
            self._metrics.observe("moebus_routes_publish_duration_seconds", self._clock.monotonic() - started)
            self._counters.acknowledged(outcome.kinds, outcome.wire_bytes)
            future.set_result(Stored(submission.ref, outcome.positions[-1], outcome.records, outcome.wire_bytes))

        return settle

    def _fence(self, fence: Delete | Clear, name: str) -> FenceReceipt:
        self._check_process(name)
        future: Future[FenceStored] = Future()
        future.set_running_or_notify_cancel()
        text = attempt_text(fence.id)

        def settle(outcome: Sent | Exception) -> None:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
                return
            self._counters.acknowledged(outcome.kinds, outcome.wire_bytes)
            future.set_result(FenceStored(text, {position.partition: position for position in outcome.positions}))

        self._sender.fence(fence, name, settle)
        return FenceReceipt(text, name, future)
