"""An answer of another engine's server in, its routes out of a store, aligned with the tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.broker.local import LocalCluster
from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics, ensure
from moebus.consumers import RoutingReader
from moebus.engine import vllm as vllm_engine
from moebus.observability.settings import KafkaSettings, Settings
from moebus.producers import AsyncRoutingPublisher, RoutingPublisher
from moebus.producers.routing import PublisherSuspended
from moebus.schemas.errors import InvalidInput
from moebus.schemas.route_ref import RouteRef
from tests.support.answers import (
    CARD,
    OUTPUT,
    PROMPT,
    ROWS,
    bare,
    described,
    fastdeploy,
    npy,
    routes_of,
    sglang,
    vllm,
    wide,
)
from tests.support.processes import Launcher, launcher
from tests.support.store_http import serving

TOPICS = Topics("t")
_RUNS = itertools.count()
WAIT = 30.0
TOKENS = PROMPT + OUTPUT
ROUTES = routes_of()
WIDE = wide(ROUTES)


@pytest.fixture(scope="module")
def broker() -> Iterator[MemoryBroker]:
    memory = MemoryBroker()
    ensure(memory.admin(), TOPICS, routes_partitions=2)
    yield memory
    memory.close()


@pytest.fixture(scope="module")
def store(broker: MemoryBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(broker, TOPICS, tmp_path_factory.mktemp("store")) as http:
        yield http.url


@pytest.fixture
def run() -> str:
    """A run that no other test uses."""
    return f"run-{next(_RUNS)}"


@pytest.fixture
def publisher(broker: MemoryBroker, run: str) -> Iterator[RoutingPublisher]:
    with RoutingPublisher(broker, TOPICS, run=run, card=CARD) as opened:
        yield opened


@pytest.fixture
def reader(broker: MemoryBroker, store: str, run: str) -> Iterator[RoutingReader]:
    with RoutingReader(broker, TOPICS, run=run, card=CARD, stores=[store]) as opened:
        yield opened


@pytest.mark.parametrize(
    ("engine", "answer"),
    [("vllm", vllm(npy(WIDE))), ("sglang", sglang(bare(WIDE))), ("fastdeploy", fastdeploy(bare(ROUTES, "uint8")))],
)
def test_each_engine_s_answer_becomes_a_rollout(
    publisher: RoutingPublisher, reader: RoutingReader, engine: str, answer: Any
) -> None:
    receipts = publisher.publish_response(engine, json.dumps(answer), "d:0:0:0", prompt_token_ids=PROMPT)
    ref = RouteRef.parse(str(receipts.ref))
    assert (ref.rows, ref.prompt_rows, ref.choice) == (ROWS, 5, 0)
    batch = reader.resolve([ref], [TOKENS], wait=WAIT)
    assert np.array_equal(batch.routes[:ROWS], ROUTES)
    assert batch.valid.tolist() == [True] * ROWS + [False]
    assert receipts.result(WAIT)[0].ref == receipts.ref
    assert receipts.done()
    assert reader.get("d:0:0:0").status == "complete"


def test_versions_of_tokens_arrive_as_versions_of_rows(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    publisher.publish_response("sglang", sglang(bare(WIDE), weight_versions=spans), "a")
    assert reader.get("a", wait=WAIT).versions == ((0, "7"), (6, "8"))
    publisher.publish_response("sglang", sglang(bare(WIDE), weight_versions=spans), "b", versions=[(0, "mine")])
    assert reader.get("b", wait=WAIT).versions == ((0, "mine"),)


def test_every_choice_is_a_rollout_of_its_own(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    other = routes_of(6, seed=9)
    answers = [sglang(bare(WIDE)), sglang(bare(wide(other)), output=[7, 8], finish="length"), sglang(None)]
    receipts = publisher.publish_response("sglang", answers, "d:0:0:0", prompt_token_ids=PROMPT)
    assert [ref.choice for ref in receipts.refs] == [0, 1, 2]
    with pytest.raises(InvalidInput, match="use refs"):
        _ = receipts.ref
    batch = reader.resolve(receipts.refs[:2], [TOKENS, [*PROMPT, 7, 8]], wait=WAIT)
    assert np.array_equal(batch.routes[ROWS + 1 : ROWS + 7], other)
    assert reader.get("d:0:0:0", 2, wait=WAIT).status == "missing"
    one = publisher.publish_response("sglang", answers[1], "d:0:0:0", choice=5)
    assert one.ref.choice == 5


def test_a_turn_sends_only_its_own_rows(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    first = publisher.publish_response("vllm", vllm(npy(WIDE)), "d:0:0:0")
    history = [*TOKENS, 30, 31]  # what the tool answered
    rows = len(history) + 1
    whole = routes_of(rows, seed=3)
    whole[:ROWS] = ROUTES
    answer = vllm(npy(wide(whole[ROWS:])), output=[40, 41])
    answer["choices"][0]["prompt_token_ids"] = history
    answer["usage"]["prompt_tokens"] = len(history)
    second = publisher.publish_response("vllm", answer, "d:0:1:0", start=ROWS, base=first.ref)
    assert second.ref.rows == rows
    assert np.array_equal(reader.resolve([second.ref], [[*history, 40, 41]], wait=WAIT).routes[:rows], whole)
    assert second.result(WAIT)[0].wire_bytes < 600  # the rows of the first turn were not sent again
    with pytest.raises(InvalidInput, match="start: 7 without a base"):
        publisher.publish_response("vllm", answer, "d:0:2:0", start=ROWS)
    answer["choices"][0]["token_ids"] = None
    with pytest.raises(InvalidInput, match="prompt_token_ids: needed with a base"):
        publisher.publish_response("vllm", answer, "d:0:2:0", start=ROWS, base=first.ref)


def test_all_rows_may_be_those_of_the_base(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    base = publisher.submit(ROUTES, "d:0:0:0", token_ids=TOKENS).ref
    done = publisher.publish_response("vllm", vllm(npy(WIDE[ROWS:])), "d:0:1:0", start=ROWS, base=base)
    assert done.ref.rows == ROWS
    assert np.array_equal(reader.resolve([done.ref], [TOKENS], wait=WAIT).routes[:ROWS], ROUTES)
    with pytest.raises(InvalidInput, match="start: 7 without a base"):
        publisher.publish_response("vllm", vllm(npy(WIDE[ROWS:])), "d:0:2:0", start=ROWS)
    aborted = publisher.publish_response("vllm", vllm(None, output=[], finish="abort"), "d:0:3:0", start=3, base=base)
    assert aborted.ref.rows == 0


def test_rows_out_of_a_cache_come_from_the_base(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    cached = WIDE.astype(np.int32)
    cached[:4] = -1
    with pytest.raises(InvalidInput, match=r"choices\[0\]\.routed_experts: rows 0 to 3 were not recorded"):
        publisher.publish_response("vllm", vllm(npy(cached, "int32")), "d:0:0:0")
    base = publisher.submit(ROUTES[:5], "d:0:0:9", token_ids=PROMPT).ref
    done = publisher.publish_response("vllm", vllm(npy(cached, "int32")), "d:0:0:0", base=base)
    assert np.array_equal(reader.resolve([done.ref], wait=WAIT).routes, ROUTES)
    short = publisher.submit(ROUTES[:2], "d:0:0:8", token_ids=PROMPT).ref
    with pytest.raises(InvalidInput, match="start: 4, but the base gives 2 rows"):
        publisher.publish_response("vllm", vllm(npy(cached, "int32")), "d:0:0:0", base=short)


@pytest.mark.parametrize(
    ("answer", "status", "rows"),
    [
        (vllm(None), "missing", 0),
        (vllm(None, output=[], finish="abort"), "aborted", 0),
        (vllm(npy(WIDE), finish="abort"), "aborted", ROWS),
        (vllm(npy(WIDE[:5]), output=[], finish="abort"), "aborted", 5),
        (vllm(npy(WIDE[:4]), output=[], finish="abort"), "aborted", 4),
        (vllm(npy(WIDE), finish=None), "partial", ROWS),
    ],
)
def test_what_is_not_complete(
    publisher: RoutingPublisher, reader: RoutingReader, answer: Any, status: str, rows: int
) -> None:
    ref = publisher.publish_response("vllm", answer, "a").ref
    found = reader.get("a", wait=WAIT)
    assert (found.status, len(found.routes), ref.rows) == (status, rows, rows)


def test_a_partial_rollout_goes_on(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    cut = publisher.publish_response("vllm", vllm(npy(WIDE), finish="abort"), "d:0:0:0", status="partial",
                                     versions=[(0, "a")])  # fmt: skip
    whole = routes_of(ROWS + 3, seed=3)
    whole[:ROWS] = ROUTES
    answer = vllm(npy(wide(whole)), output=[50, 51, 52], weight_version="b")
    answer["choices"][0]["prompt_token_ids"] = TOKENS
    answer["usage"]["prompt_tokens"] = len(TOKENS)
    on = publisher.publish_response("vllm", answer, "d:0:0:0", base=cut.ref)
    assert np.array_equal(reader.resolve([on.ref], [[*TOKENS, 50, 51, 52]], wait=WAIT).routes[: ROWS + 3], whole)
    assert reader.get("d:0:0:0", attempt=on.ref.attempt).versions == ((0, "a"), (ROWS, "b"))


def test_what_was_not_stored_is_told(publisher: RoutingPublisher) -> None:
    publisher.suspend()
    receipts = publisher.publish_response("sglang", [sglang(bare(WIDE)), sglang(bare(WIDE))], "a")
    assert receipts.done()
    with pytest.raises(PublisherSuspended):
        receipts.result(WAIT)

    async def wait() -> None:
        await receipts

    with pytest.raises(PublisherSuspended):
        asyncio.run(wait())


def test_a_streamed_answer(publisher: RoutingPublisher, reader: RoutingReader) -> None:
    stream = vllm_engine.RouteStream(CARD, prompt_token_ids=PROMPT)
    for place, token in enumerate(OUTPUT):
        last = place == len(OUTPUT) - 1
        choice = {"index": 0, "token_ids": [token], "finish_reason": "stop" if last else None,
                  "routed_experts": npy(WIDE) if last else None}  # fmt: skip
        stream.feed_text(f"data: {json.dumps({'request_id': 'g', 'choices': [choice]})}\n\n")
    ref = publisher.publish_response("vllm", stream.response(), "s", prompt_token_ids=PROMPT).ref
    assert np.array_equal(reader.resolve([ref], [TOKENS], wait=WAIT).routes[:ROWS], ROUTES)


def test_fastdeploy_names_the_rollout_itself(publisher: RoutingPublisher) -> None:
    answer = fastdeploy(bare(ROUTES, "uint8"))
    assert publisher.publish_response("fastdeploy", answer).ref.rollout_id == "data-7:2:1:0"
    assert publisher.publish_response("fastdeploy", answer, "other").ref.rollout_id == "other"
    for engine, other in (("vllm", vllm(npy(WIDE))), ("sglang", sglang(bare(WIDE)))):
        with pytest.raises(InvalidInput, match="rollout_id: needed"):
            publisher.publish_response(engine, other)


def test_nothing_of_a_wrong_answer_is_sent(publisher: RoutingPublisher) -> None:
    good, bad = sglang(bare(WIDE)), sglang("AAAA")
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("engine", ("trtllm", good, "a"), {}),
        ("[1].meta_info.routed_experts", ("sglang", [good, bad], "a"), {}),
        ("choice", ("sglang", [good, good], "a"), {"choice": 1}),
        ("choice", ("sglang", good, "a"), {"choice": 70_000}),
        ("start", ("sglang", good, "a"), {"start": -1}),
        ("rollout_id", ("sglang", good, ""), {}),
        ("status", ("sglang", good, "a"), {"status": "done"}),
        ("versions", ("sglang", good, "a"), {"versions": [(3, "x")]}),
        ("prompt_token_ids", ("sglang", good, "a"), {"prompt_token_ids": ["x"]}),
        ("meta_info.routed_experts", ("sglang", good, "a"), {"prompt_token_ids": [1]}),
        ("response", ("sglang", "{", "a"), {}),
        ("response", ("sglang", None, "a"), {}),
    ]
    for field, arguments, more in refused:
        with pytest.raises(InvalidInput) as caught:
            publisher.publish_response(*arguments, **more)
        assert isinstance(caught.value, ValueError)
        assert caught.value.field == field, arguments
    assert publisher.stats().submitted == 0


def test_without_a_card_there_is_nothing_to_decode(broker: MemoryBroker) -> None:
    with (
        RoutingPublisher(broker, TOPICS, run="run", card=None) as publisher,
        pytest.raises(InvalidInput, match="card"),
    ):
        publisher.publish_response("vllm", vllm(npy(WIDE)), "a")


@pytest.fixture
def fleet(kafka_broker: LocalCluster, topic_prefix: str, tmp_path: Path) -> Iterator[Launcher]:
    with launcher(tmp_path, kafka_broker.bootstrap, topic_prefix) as opened:
        assert opened.run("topics", "ensure").returncode == 0
        yield opened


@pytest.mark.kafka
def test_through_kafka_and_a_store_process(fleet: Launcher) -> None:
    """Answers in, routes out of `RoutingReader.resolve`: the publisher's child, the broker and the store are real."""
    fleet.store()
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=fleet.bootstrap), topic_prefix=fleet.prefix, run="exp")

    async def publish() -> list[RouteRef]:
        publisher = await AsyncRoutingPublisher.from_settings(card=CARD, settings=settings)
        async with publisher:
            receipts = [
                await publisher.publish_response("vllm", vllm(described(WIDE)), "d:0:0:0"),
                await publisher.publish_response("sglang", sglang(bare(WIDE)), "d:0:1:0", prompt_token_ids=PROMPT),
                await publisher.publish_response("fastdeploy", fastdeploy(bare(ROUTES, "int64"))),
            ]
            for receipt in receipts:
                assert len(await asyncio.wait_for(receipt, WAIT)) == 1
            return [receipt.ref for receipt in receipts]

    refs = asyncio.run(publish())
    with RoutingReader.from_settings(card=CARD, settings=settings) as reader:
        batch = reader.resolve(refs, [TOKENS] * 3, wait=WAIT)
    assert np.array_equal(batch.routes.reshape(3, ROWS + 1, *CARD.shape(0)[1:])[:, :ROWS], np.stack([ROUTES] * 3))
