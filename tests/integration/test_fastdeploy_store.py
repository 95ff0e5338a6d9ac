"""The drop-in for FastDeploy's routing store: its calls as FastDeploy makes them, up to what a trainer reads."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics, ensure
from moebus.consumers import RoutingReader
from moebus.consumers.reader import StoreUnreachable
from moebus.producers import RoutingPublisher
from moebus.producers.fastdeploy_child import MoebusRoutingStore, get_routing_store
from moebus.producers.fastdeploy_parts import OPEN_ROLLOUTS, LayerCollector, card_of, missing_row, split_layer
from moebus.producers.fastdeploy_store import LayersLost, StoreWrapper
from moebus.producers.routing import PublisherClosed
from moebus.schemas.errors import InvalidInput, SettingsError
from moebus.schemas.layouts import to_fastdeploy
from moebus.schemas.model_card import ModelCard
from moebus.schemas.route_errors import RouteDeleted, StoreCatchingUp
from tests.support.routes import make_routes
from tests.support.store_http import serving
from tests.support.wait import wait_until

CASES = json.loads((Path(__file__).parents[1] / "cases" / "rollout_ids.json").read_text())
TOPICS = Topics("t")
WAIT = 30.0
CARD = ModelCard(64, 4, (1, 2, 3))
UUID = "d9f16c5c-65f6-4815-b44d-14e2c581907c"


def fd_config(**replay: Any) -> Any:
    """What the drop-in reads of FastDeploy's config: a model of four layers, the first one dense."""
    model = SimpleNamespace(
        num_hidden_layers=4, moe_layer_start_index=1, moe_num_experts=64, moe_k=4, max_model_len=32,
        architectures=["Ernie4_5_MoeForCausalLM"],
    )  # fmt: skip
    return SimpleNamespace(model_config=model, routing_replay_config=SimpleNamespace(use_fused_put=True, **replay))


def gathered(rows: int, seed: int = 0) -> np.ndarray:
    """As FastDeploy submits it: [layers, tokens, top_k], uint8."""
    return np.ascontiguousarray(make_routes(rows, CARD, seed).transpose(1, 0, 2))


def request_id(rollout_id: str, choice: int = 0) -> str:
    return f"chatcmpl-{rollout_id}-{UUID}_{choice}"


@dataclass
class World:
    """A started wrapper and a trainer."""

    broker: MemoryBroker
    wrapper: StoreWrapper
    publisher: RoutingPublisher
    reader: RoutingReader

    def read(self, rollout_id: str, choice: int = 0) -> np.ndarray:
        return self.reader.get(rollout_id, choice, wait=WAIT).routes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    broker = MemoryBroker()
    ensure(broker.admin(), TOPICS, routes_partitions=2)
    with (
        serving(broker, TOPICS, tmp_path / "store") as http,
        RoutingReader(broker, TOPICS, run="run", card=CARD, stores=[http.url]) as reader,
        RoutingPublisher(broker, TOPICS, run="run", card=CARD, epoch=1) as publisher,
    ):
        wait_until(lambda: _ready(reader), 30, "the store to be ready")
        wrapper = StoreWrapper(fd_config(), publisher=publisher)
        wrapper.start_store_warpper()
        yield World(broker, wrapper, publisher, reader)
        wrapper.shutdown()
    broker.close()


@pytest.fixture
def wrapper() -> Iterator[StoreWrapper]:
    """A started wrapper, and nobody who reads."""
    broker = MemoryBroker()
    ensure(broker.admin(), TOPICS, routes_partitions=2)
    with RoutingPublisher(broker, TOPICS, run="run", card=CARD) as publisher:
        made = StoreWrapper(fd_config(), publisher=publisher)
        made.start_store_warpper()
        yield made
        made.shutdown()
    broker.close()


def _ready(reader: RoutingReader) -> bool:
    try:
        reader.page(limit=1)
    except (StoreUnreachable, StoreCatchingUp):
        return False
    return True


def test_the_arguments_are_those_of_fastdeploy() -> None:
    def names(call: Any) -> list[str]:
        return [name for name in inspect.signature(call).parameters if name != "self"]

    assert names(StoreWrapper.__init__)[0] == "fd_config"
    assert names(StoreWrapper.submit_put_task) == ["routing_indices", "rollout_id", "layer_idx"]
    assert names(StoreWrapper.submit_clear_prefix_batch_task) == ["rollout_id", "layer_idx"]
    assert names(StoreWrapper.get_needed_clear_ids) == ["rollout_id"]
    assert names(StoreWrapper.submit_clear_store_task) == names(StoreWrapper.start_store_warpper) == []
    assert names(MoebusRoutingStore.put) == ["routing_key", "routing_indices"]
    assert names(MoebusRoutingStore.clear_prefix_batch) == ["routing_prefix_key"]
    assert names(get_routing_store) == ["routing_replay_config"]


def test_fused_and_layer_by_layer_read_the_same(world: World) -> None:
    world.wrapper.submit_put_task(routing_indices=gathered(7), rollout_id="a:0:0:0")
    layers = gathered(7)
    receipts = [
        world.wrapper.submit_put_task(routing_indices=layers[index], rollout_id="b:0:0:0", layer_idx=index)
        for index in (2, 0, 1)
    ]
    assert not receipts[0].name.startswith("chatcmpl")
    assert len({receipt.result(WAIT).ref for receipt in receipts}) == 1
    assert np.array_equal(world.read("a:0:0:0"), make_routes(7, CARD))
    assert np.array_equal(world.read("b:0:0:0"), make_routes(7, CARD))
    assert world.reader.get("a:0:0:0").layers == (1, 2, 3)


def test_the_buffer_may_be_used_again_at_once(world: World) -> None:
    fused, layer = gathered(5), gathered(5)
    world.wrapper.submit_put_task(fused, "a:0:0:0")
    for index in range(3):
        buffer = layer[index].copy()
        world.wrapper.submit_put_task(buffer, "b:0:0:0", layer_idx=index)
        buffer[:] = 0
    fused[:] = 0
    assert np.array_equal(world.read("a:0:0:0"), make_routes(5, CARD))
    assert np.array_equal(world.read("b:0:0:0"), make_routes(5, CARD))


def test_choices_of_a_request_id_stand_apart(world: World) -> None:
    for choice in range(3):
        world.wrapper.submit_put_task(gathered(4, choice), request_id("my-user-id:0:0:0", choice))
    for choice in range(3):
        assert np.array_equal(world.read("my-user-id:0:0:0", choice), make_routes(4, CARD, choice))


@pytest.mark.parametrize("case", CASES["fastdeploy_request_ids"], ids=lambda case: case["request_id"][:40] or "empty")
def test_ids_follow_fastdeploys_rule(wrapper: StoreWrapper, case: dict[str, Any]) -> None:
    receipt = wrapper.submit_put_task(gathered(2), case["request_id"])
    plain = not case["request_id"].startswith("chatcmpl-")
    if case["verdict"] == "refused" and not (plain and case["request_id"]):
        with pytest.raises(InvalidInput, match=r"request_id|rollout_id"):
            receipt.result(WAIT)
        assert wrapper.refused == 1
    elif not plain:
        ref = receipt.result(WAIT).ref
        assert (ref.rollout_id, ref.choice) == (case["rollout_id"], case["choice"])
        assert wrapper.refused == 0
    else:  # what split_request_id made of it is an opaque id
        assert receipt.result(WAIT).ref.rollout_id == case["request_id"]


@pytest.mark.parametrize(
    ("rollout_id", "before"),
    [
        ("xxx_xxx_epoch_15:2:2:1", "xxx_xxx_epoch_15:2:1:1"),
        (request_id("xxx_xxx_epoch_15:2:2:1", 3), "xxx_xxx_epoch_15:2:1:1"),
        ("my-user-id:0:0:0", None),
        ("d9f16c5c", None),
        ("a:1:2:3_0", None),  # where eval would read segment 30
        ("a:1:(1+1):0", None),
        ("a:1:08:0", None),
        ("a:1:__import__('os'):0", None),
    ],
)
def test_what_a_turn_supersedes(wrapper: StoreWrapper, rollout_id: str, before: str | None) -> None:
    assert wrapper.get_needed_clear_ids(rollout_id) == before


@pytest.mark.parametrize("layered", [False, True])
def test_only_the_last_turn_stays_and_a_late_put_brings_nothing_back(world: World, layered: bool) -> None:
    for turn in range(11):
        routes = gathered(3 + turn)
        if layered:
            for index in range(3):
                world.wrapper.submit_put_task(routes[index], f"a:1:{turn}:1", layer_idx=index)
                world.wrapper.submit_clear_prefix_batch_task(f"a:1:{turn}:1", layer_idx=index)
        else:
            world.wrapper.submit_put_task(routes, f"a:1:{turn}:1")
            world.wrapper.submit_clear_prefix_batch_task(f"a:1:{turn}:1")
    world.wrapper.submit_put_task(gathered(2), "a:1:9:10")  # another segment: 1 must not take 10
    late = world.wrapper.submit_put_task(gathered(3), "a:1:0:1").result(WAIT)
    assert world.read("a:1:10:1").shape == (13, 3, 4)
    with pytest.raises(RouteDeleted):
        world.reader.get("a:1:0:1", min_offset=late.end.offset + 1, wait=WAIT)
    assert sorted(one.ref.rollout_id for one in world.reader.page().rollouts) == ["a:1:10:1", "a:1:9:10"]


def test_a_clear_at_start_takes_earlier_epochs_of_this_run_alone(world: World) -> None:
    with (
        RoutingPublisher(world.broker, TOPICS, run="run", card=CARD, epoch=0) as old,
        RoutingPublisher(world.broker, TOPICS, run="other", card=CARD) as other,
    ):
        old.submit(make_routes(2, CARD), "old:0:0:0").result(WAIT)
        other.submit(make_routes(2, CARD), "theirs:0:0:0").result(WAIT)
    world.wrapper.submit_put_task(gathered(2), "mine:0:0:0").result(WAIT)
    world.reader.get("mine:0:0:0", wait=WAIT)  # acknowledged is not yet in the store
    world.wrapper.submit_clear_store_task()
    wait_until(lambda: not world.reader.exists("old:0:0:0"), 30, "the clear")
    assert world.reader.exists("mine:0:0:0")


def test_rows_that_were_never_captured_are_said_and_not_sent(world: World) -> None:
    routes = gathered(6)
    routes[1, 4] = 255
    world.wrapper.submit_put_task(routes, "a:0:0:0")
    found = world.reader.get("a:0:0:0", wait=WAIT)
    assert (found.status, found.finish_reason, found.ref.rows) == ("missing", "row 4 was never captured", 0)
    assert missing_row(make_routes(4, CARD)) is None
    assert missing_row(np.full((2, 3, 4), -1, np.int64)) == 0


@pytest.mark.parametrize(
    ("routes", "why"),
    [
        (gathered(3)[:2], "shape"),
        (gathered(3)[..., :2], "shape"),
        (np.full((3, 2, 4), 64, np.uint8), "expert id 64"),
        (gathered(3)[0], "is needed"),
        (gathered(3).astype(np.float32), "integers"),
    ],
)
def test_arrays_of_another_model_are_refused_and_counted(wrapper: StoreWrapper, routes: np.ndarray, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        wrapper.submit_put_task(routes, "a:0:0:0").result(WAIT)
    assert wrapper.refused == 1


def test_layers_that_do_not_fit_or_do_not_come(wrapper: StoreWrapper) -> None:
    put = wrapper.submit_put_task
    first = put(gathered(3)[0], "a:0:0:0", layer_idx=0)
    again = [put(layer, "a:0:0:0", layer_idx=index) for index, layer in enumerate(gathered(4))]  # a retry, longer
    with pytest.raises(LayersLost, match="1 layers came"):
        first.result(WAIT)
    assert again[0].result(WAIT).ref.rows == 4
    with pytest.raises(InvalidInput, match="3 MoE layers"):
        put(gathered(3)[0], "b:0:0:0", layer_idx=3).result(WAIT)
    with pytest.raises(InvalidInput, match="one layer"):
        put(gathered(3), "b:0:0:0", layer_idx=0).result(WAIT)
    open_ended = put(gathered(3)[0], "c:0:0:0", layer_idx=0)
    assert wrapper.shutdown() == ["c:0:0:0#0"]
    with pytest.raises(LayersLost):
        open_ended.result(WAIT)
    with pytest.raises(PublisherClosed, match="not started"):
        put(gathered(3), "d:0:0:0")


def test_the_oldest_open_rollouts_are_given_up() -> None:
    collector = LayerCollector(2)
    for number in range(OPEN_ROLLOUTS + 3):
        collector.add((f"r{number}", 0), 0, np.zeros((1, 1), np.uint8))
    assert [key for key, _ in collector.given_up()] == [("r0", 0), ("r1", 0), ("r2", 0)]
    assert collector.given_up() == []


def test_the_model_is_read_from_fastdeploys_config() -> None:
    assert card_of(fd_config(num_moe_layers=3, moe_top_k=4)) == CARD
    with pytest.raises(InvalidInput, match="num_moe_layers"):
        card_of(fd_config(num_moe_layers=4))
    glm = fd_config()
    glm.model_config.architectures = ["Glm4MoeForCausalLM"]
    glm.model_config.num_experts_per_tok = 8
    assert card_of(glm).top_k == 8
    del glm.model_config.moe_num_experts
    with pytest.raises(InvalidInput, match="moe_num_experts"):
        StoreWrapper(glm)


# --- the store in FastDeploy's child process ---


@pytest.fixture
def child(world: World) -> MoebusRoutingStore:
    return MoebusRoutingStore(SimpleNamespace(use_fused_put=True), publisher=world.publisher)


def test_padded_arrays_lose_their_padding(world: World, child: MoebusRoutingStore) -> None:
    padded = to_fastdeploy(make_routes(7, CARD), 64, max_model_len=32)

    async def main() -> None:
        await child.put(routing_key="a:0:0:0", routing_indices=padded)
        for index in (1, 0, 2):  # one after the other: only the last one waits
            await child.put(routing_key=f"b_1:0:0:0_{index}", routing_indices=padded[index])

    asyncio.run(main())
    assert np.array_equal(world.read("a:0:0:0"), make_routes(7, CARD))
    assert np.array_equal(world.read("b_1:0:0:0"), make_routes(7, CARD))


def test_a_put_that_returns_is_stored_and_one_that_is_not_raises(world: World, child: MoebusRoutingStore) -> None:
    padded = to_fastdeploy(make_routes(3, CARD), 64, max_model_len=8)

    async def refused() -> None:
        with world.broker.refusing(lambda record: True), pytest.raises(Exception, match="refused"):
            await child.put("a:0:0:0", padded)

    asyncio.run(refused())
    torn = padded.copy()
    torn[0, 1] = 255

    async def gaps() -> None:
        with pytest.raises(InvalidInput, match="routes"):
            await child.put("b:0:0:0", torn)

    asyncio.run(gaps())
    assert world.reader.get("b:0:0:0", wait=WAIT).status == "missing"


@pytest.mark.parametrize("fused", [True, False])
def test_clearing_in_the_child(world: World, child: MoebusRoutingStore, fused: bool) -> None:
    child.routing_replay_config.use_fused_put = fused
    for name in ("a:0:1:1", "a:0:1:10"):
        world.wrapper.submit_put_task(gathered(2), name).result(WAIT)
        world.reader.get(name, wait=WAIT)  # acknowledged is not yet in the store

    async def main() -> None:
        if fused:
            await child.clear_prefix_batch(routing_prefix_key="a:0:1:1")
        else:
            for index in range(3):
                await child.clear_prefix_batch(routing_prefix_key=f"a:0:1:1_{index}")
        await child.clear_store()

    asyncio.run(main())
    wait_until(lambda: not world.reader.exists("a:0:1:1"), 30, "the delete")
    assert world.reader.exists("a:0:1:10")


def test_a_child_without_a_model_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MOEBUS_FASTDEPLOY__MODEL", raising=False)
    with pytest.raises(SettingsError, match=r"fastdeploy\.model"):
        get_routing_store(SimpleNamespace())
    monkeypatch.setenv("MOEBUS_FASTDEPLOY__MODEL", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="cannot be read"):
        get_routing_store(SimpleNamespace())


@pytest.mark.parametrize("key", ["a", "_1", "a_x", "a_"])
def test_keys_of_layers(key: str) -> None:
    assert split_layer("a_1:0:0:0_12") == ("a_1:0:0:0", 12)
    with pytest.raises(InvalidInput, match="routing_key"):
        split_layer(key)
