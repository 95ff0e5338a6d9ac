"""A drop-in for the store in FastDeploy's child process, which gets arrays that are padded already."""

from __future__ import annotations

import asyncio
from typing import Any

from moebus.observability.log import get_logger
from moebus.observability.settings import load_settings
from moebus.producers.fastdeploy_parts import Ids, LayerCollector, clear_earlier, publish_rows, split_id, split_layer
from moebus.producers.model_file import read_card
from moebus.producers.routing import RoutingPublisher
from moebus.schemas.errors import InvalidInput, SettingsError
from moebus.schemas.layouts import from_fastdeploy

CLOSE_SECONDS = 10.0
_log = get_logger(__name__)


class MoebusRoutingStore:
    """A store for FastDeploy's child process, which pads before it puts: [moe_layers, max_model_len, top_k], or
    [max_model_len, top_k] of one layer. One event loop uses it."""

    def __init__(self, routing_replay_config: Any, *, publisher: RoutingPublisher | None = None) -> None:
        """`publisher`: default one made from the settings, `fastdeploy.model` among them.

        Raises:
            SettingsError: field `fastdeploy.model`, or another.
        """
        self.routing_replay_config = routing_replay_config
        self._publisher = publisher or _own_publisher()
        card = self._publisher.card
        if card is None:
            raise SettingsError("fastdeploy: the publisher has no model card")
        self._card = card
        self._layers = LayerCollector(len(card.moe_layers))

    async def put(self, routing_key: str, routing_indices: Ids) -> None:
        """Publishes, and returns once it is stored; for single layers the last one to come waits for all.

        Raises:
            InvalidInput: naming the argument.  AppendFailed, AppendUnknown, RoutesDropped: it is not stored.
        """
        whole: Ids | None = routing_indices
        name = routing_key
        if routing_indices.ndim == 2:
            name, layer = split_layer(routing_key)
            _, whole = self._layers.add(split_id(name), layer, routing_indices)
            for (rollout_id, choice), _ in self._layers.given_up():
                _log.error("fastdeploy.given_up", f"{rollout_id}#{choice}: not every layer was put")
        if whole is not None:
            await self._publish(split_id(name), whole)

    async def _publish(self, key: tuple[str, int], padded: Ids) -> None:
        try:
            rows = from_fastdeploy(padded, self._card.num_experts)
        except InvalidInput as error:  # no trainer may wait for it
            await self._publisher.submit(None, *key, status="missing", finish_reason=error.reason[:200])
            raise
        await publish_rows(self._publisher, key, rows)

    async def clear_store(self) -> None:
        """Removes earlier epochs of this run."""
        receipt = clear_earlier(self._publisher)
        if receipt is not None:
            await receipt

    async def clear_prefix_batch(self, routing_prefix_key: str) -> None:
        """Removes one id, once all partitions have it. Of the keys of single layers, that of the last one counts.

        Raises:
            InvalidInput: naming the argument.  AppendFailed, AppendUnknown.
        """
        name = routing_prefix_key
        if not getattr(self.routing_replay_config, "use_fused_put", True):
            name, layer = split_layer(routing_prefix_key)
            if layer != len(self._card.moe_layers) - 1:
                return
        await self._publisher.delete(split_id(name)[0])

    async def close(self) -> list[str]:
        """Waits up to 10 s; returns what was given up, by name."""
        return await asyncio.to_thread(self._publisher.close, CLOSE_SECONDS)


def get_routing_store(routing_replay_config: Any) -> MoebusRoutingStore:
    """In place of FastDeploy's function of that name."""
    return MoebusRoutingStore(routing_replay_config)


def _own_publisher() -> RoutingPublisher:
    settings = load_settings()
    if settings.fastdeploy.model is None:
        raise SettingsError("fastdeploy.model: needed by a store in FastDeploy's child process; name its config.json")
    try:
        card = read_card(settings.fastdeploy.model, "fastdeploy.model")
    except InvalidInput as error:
        raise SettingsError(str(error)) from None
    return RoutingPublisher.from_settings(card=card, epoch=settings.fastdeploy.epoch, settings=settings)
