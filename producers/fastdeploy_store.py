"""A drop-in for FastDeploy's routing store, in its engine: the same calls, published through RoutingPublisher.

docs/fastdeploy.md says which two lines of FastDeploy choose it; `fastdeploy_child` is the one for its child process.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from moebus.observability.log import get_logger
from moebus.observability.settings import Settings, load_settings
from moebus.producers.fastdeploy_parts import (
    Ids,
    LayerCollector,
    Layered,
    card_of,
    clear_earlier,
    publish_rows,
    split_id,
    turn_before,
)
from moebus.producers.routing import PublisherClosed, Receipt, RoutingPublisher, Stored
from moebus.schemas.errors import FatalError, InvalidInput

CLOSE_SECONDS = 10.0
_log = get_logger(__name__)


class LayersLost(FatalError):
    """Not every layer of this rollout was submitted; nothing of it was published."""


class StoreWrapper:
    """Called where requests end. Thread-safe; no call raises into the step: a receipt says what became of a rollout,
    `refused` counts those that could not be published at all. None waits for the log either, with the setting
    `publisher.full = "drop"`; with `block` a full buffer is waited for, up to `publisher.block_seconds`."""

    def __init__(self, fd_config: Any, *, publisher: RoutingPublisher | None = None) -> None:
        """`publisher`: default one made from the settings, for this model, when it is started.

        Raises:
            InvalidInput: naming what FastDeploy's config lacks.  SettingsError: naming the setting.
        """
        self.fd_config = fd_config
        self.card = card_of(fd_config)
        self.refused = 0
        self._publisher = publisher
        self._settings: Settings | None = None if publisher is not None else load_settings()
        self._owns = publisher is None
        self._running = False
        self._lock = threading.Lock()
        self._layers = LayerCollector(len(self.card.moe_layers))

    def start_store_warpper(self) -> None:
        """Starts publishing (the name is FastDeploy's). A second call does nothing."""
        if self._running:
            return
        if self._publisher is None and self._settings is not None:
            epoch = self._settings.fastdeploy.epoch
            self._publisher = RoutingPublisher.from_settings(card=self.card, epoch=epoch, settings=self._settings)
        self._running = True
        atexit.register(self.shutdown)

    def shutdown(self) -> list[str]:
        """Waits up to 10 s for what is under way. Returns, and logs, what was given up, by name."""
        if not self._running:
            return []
        self._running = False
        atexit.unregister(self.shutdown)
        with self._lock:
            unfinished = self._layers.clear()
        for (rollout_id, choice), held in unfinished:
            _fail(held, rollout_id, choice)
        left = [f"{rollout_id}#{choice}" for (rollout_id, choice), _ in unfinished]
        if self._publisher is not None and self._owns:
            left += self._publisher.close(CLOSE_SECONDS)
        for name in left:
            _log.error("fastdeploy.given_up", f"{name} was not stored when the engine ended")
        return left

    def submit_put_task(self, routing_indices: Ids, rollout_id: str, layer_idx: int | None = None) -> Receipt[Stored]:
        """Routes of a finished request, integers [moe_layers, tokens, top_k], or of one layer [tokens, top_k].

        `rollout_id`: or the whole request id, which also tells the choice. The layers of a rollout are published
        together once all have come, and share one receipt. Rows that were never captured (all fill) make it a rollout
        of status missing, so that no trainer waits for it.

        Raises:
            PublisherClosed: not started, or shut down.
        """
        publisher = self._started()
        try:
            key = split_id(rollout_id)
            if layer_idx is None:
                return self._publish(publisher, key, routing_indices)
            return self._one_layer(publisher, key, layer_idx, routing_indices)
        except InvalidInput as error:
            return self._refuse(str(rollout_id), error)

    def submit_clear_store_task(self) -> None:
        """Removes earlier epochs of this run; never this one, and never what others stored.

        Raises:
            PublisherClosed: not started, or shut down.
        """
        clear_earlier(self._started())

    def submit_clear_prefix_batch_task(self, rollout_id: str, layer_idx: int | None = None) -> None:
        """Removes the turn before that of `rollout_id`, for good in this epoch; nothing at turn 0. Of the calls for
        single layers, that for the last one counts.

        Raises:
            PublisherClosed: not started, or shut down.
        """
        publisher = self._started()
        if layer_idx not in (None, len(self.card.moe_layers) - 1):
            return
        try:
            before = self.get_needed_clear_ids(rollout_id)
            if before is not None:
                publisher.delete(before)
        except InvalidInput as error:
            self._refuse(str(rollout_id), error)

    def get_needed_clear_ids(self, rollout_id: str) -> str | None:
        """The id that `rollout_id` supersedes: `data:gen:turn-1:segment`. None at turn 0 and for ids without turns.

        Raises:
            InvalidInput: field `request_id` or `rollout_id`.
        """
        return turn_before(split_id(rollout_id)[0])

    def _started(self) -> RoutingPublisher:
        if not self._running or self._publisher is None:
            raise PublisherClosed("the routing store is not started, or was shut down")
        return self._publisher

    def _one_layer(self, publisher: RoutingPublisher, key: tuple[str, int], layer: int, rows: Ids) -> Receipt[Stored]:
        if rows.ndim != 2:
            raise InvalidInput("routing_indices", f"{list(rows.shape)} where one layer is [tokens, top_k]")
        with self._lock:
            held, whole = self._layers.add(key, layer, rows)
            if held.extra is None:
                held.extra = _pending(key)
            receipt: Receipt[Stored] = held.extra[0]
            given_up = self._layers.given_up()
        for (rollout_id, choice), left in given_up:
            _fail(left, rollout_id, choice)
        if whole is not None:
            _follow(held.extra[1], lambda: self._publish(publisher, key, whole))
        return receipt

    def _publish(self, publisher: RoutingPublisher, key: tuple[str, int], routes: Ids) -> Receipt[Stored]:
        if routes.ndim != 3:
            raise InvalidInput("routing_indices", f"{list(routes.shape)} where [moe_layers, tokens, top_k] is needed")
        return publish_rows(publisher, key, routes.transpose(1, 0, 2))

    def _refuse(self, name: str, error: InvalidInput) -> Receipt[Stored]:
        with self._lock:
            self.refused += 1
        _log.error("fastdeploy.refused", f"{name[:300]} is not published: {error}")
        future: Future[Stored] = Future()
        future.set_exception(error)
        return Receipt(name, future)


def _pending(key: tuple[str, int]) -> tuple[Receipt[Stored], Future[Stored]]:
    future: Future[Stored] = Future()
    future.set_running_or_notify_cancel()
    return Receipt(f"{key[0]}#{key[1]}", future), future


def _follow(future: Future[Stored], publish: Callable[[], Receipt[Stored]]) -> None:
    """Settles `future` as the receipt of what `publish` submits."""

    def settle(receipt: Receipt[Stored]) -> None:
        error = receipt.exception(0)
        with contextlib.suppress(Exception):
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(receipt.result(0))

    try:
        publish().add_done_callback(settle)
    except Exception as error:
        future.set_exception(error)
        raise


def _fail(held: Layered, rollout_id: str, choice: int) -> None:
    text = f"{rollout_id}#{choice}: {len(held.layers)} layers came and not the others"
    _log.error("fastdeploy.given_up", text)
    if held.extra is not None:
        held.extra[1].set_exception(LayersLost(text))
