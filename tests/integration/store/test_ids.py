"""Every id that may be published can be asked for: from a store, by its client, through the gateway."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from moebus.cli._gateway_routes import StoreProxy
from moebus.consumers.reader.ask import Query
from moebus.consumers.reader.store_client import StoreClient, rollout_path
from moebus.observability.clock import SystemClock
from moebus.producers.gateway import Backend
from tests.support.gateway import page
from tests.support.routes import Attempt, make_attempt
from tests.support.store import Rig
from tests.support.store_http import serving
from tests.support.wait import wait_until

NASTY = (
    ".", "..", "a/../b", "../../etc/passwd", "./a", "a/.", "/", "//", "/a", "a/", "a//b", "...", "%2e%2e", "%2F", "%",
    "%00", "a b", " ", "a+b", "?", "a?b=c", "#", "a#b", "&x=1", ";", "\\..\\", "\n", "\x00", "\x7f", "a\r\nb: c",
    "ü", "路由", "\U0001f600", "e\u0301", "\u202e", "x" * 255, "é" * 127, "..%2f", "a:1:0:0", ":", "{x}", "<b>", '"',
)  # fmt: skip


@dataclass
class Asked:
    """A store that holds all of them, and a gateway before it."""

    url: str
    gateway: httpx.Client
    attempts: dict[tuple[str, str], Attempt]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    rig = Rig(tmp_path_factory.mktemp("ids"))
    pairs = [("run", rollout_id) for rollout_id in NASTY] + [("..", "a"), (".", ".."), ("...", "a")]
    attempts = {
        (run, rollout_id): make_attempt(rollout_id, run=run, number=number, rows=3, group="g")
        for number, (run, rollout_id) in enumerate(pairs, 1)
    }
    rig.put(*attempts.values())
    proxy = StoreProxy()
    with serving(rig.broker, rig.topics, rig.folder) as http, page(Backend(lambda: None), routes=proxy) as gateway:
        proxy.open(rig.broker, rig.topics, SystemClock())
        last = list(attempts)[-1]
        path, names = rollout_path(*last)
        wait_until(lambda: gateway.get(path, params=names).status_code == 200, what="the store to be found")
        yield Asked(http.url, gateway, attempts)
        proxy.close()


@pytest.fixture(scope="module")
def client() -> Iterator[StoreClient]:
    made = StoreClient()
    yield made
    made.close()


ALL = pytest.mark.parametrize(
    ("run", "rollout_id"), [("run", one) for one in NASTY] + [("..", "a"), (".", ".."), ("...", "a")], ids=ascii
)


@ALL
def test_the_client_gets_it(asked: Asked, client: StoreClient, run: str, rollout_id: str) -> None:
    want = asked.attempts[run, rollout_id]
    found = client.get(asked.url, Query(run, rollout_id), 5.0)
    assert (found.ref.run, found.ref.rollout_id) == (run, rollout_id)
    np.testing.assert_array_equal(found.routes, want.routes)
    assert client.head(asked.url, Query(run, rollout_id), 5.0).ref == found.ref


@ALL
def test_the_gateway_gives_it(asked: Asked, run: str, rollout_id: str) -> None:
    want = asked.attempts[run, rollout_id]
    whole = {"run": run, "rollout_id": rollout_id}
    for path, names in (rollout_path(run, rollout_id), ("/v1/rollout", whole)):
        answer = asked.gateway.get(path, params=names)
        assert answer.status_code == 200, answer.text
        np.testing.assert_array_equal(np.load(io.BytesIO(answer.content), allow_pickle=False), want.routes)


def test_the_form_in_the_query_is_as_strict_as_the_path(asked: Asked) -> None:
    for base in (asked.url, str(asked.gateway.base_url).rstrip("/")):
        for params, field in (
            ({"run": "run"}, "rollout_id"),
            ({"rollout_id": "."}, "run"),
            ({"run": "run", "rollout_id": ""}, "rollout_id"),
            ({"run": "a b", "rollout_id": "."}, "run"),
            ({"run": "run", "rollout_id": "x" * 256}, "rollout_id"),
            ({"run": "run", "rollout_id": ".", "colour": "red"}, "colour"),
        ):
            answer = httpx.get(f"{base}/v1/rollout", params=params, trust_env=False)
            assert answer.status_code == 400, answer.text
            assert field in answer.text
