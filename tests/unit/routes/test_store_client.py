"""StoreClient against answers made by hand: what is asked, what is believed."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import numpy as np
import pytest

from moebus.consumers.reader.ask import Query
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.store_client import StoreClient
from moebus.schemas.attempt import attempt_text
from moebus.schemas.errors import InvalidInput
from moebus.schemas.route_answer import RouteAnswer
from moebus.schemas.route_errors import ROUTE_ERRORS, RouteCorrupt
from moebus.schemas.route_ref import RouteRef
from tests.support.routes import CARD, attempt_id, make_routes

REF = RouteRef("run", "a/b c:0:0:0", 2, attempt_text(attempt_id(1)), 5)
ROUTES = make_routes(5)
ANSWER = RouteAnswer(REF, 0, 5, CARD.moe_layers, CARD.top_k, CARD.num_experts, "partial", versions=((0, "v"),))
QUERY = Query("run", "a/b c:0:0:0", 2)


def client(handler: Callable[[httpx.Request], httpx.Response]) -> StoreClient:
    return StoreClient(httpx.MockTransport(handler))


def good(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, headers=ANSWER.to_headers(), content=ROUTES.tobytes())


def test_rows_come_back_equal_and_writable() -> None:
    found = client(good).get("http://s", QUERY, 0.0)
    assert np.array_equal(found.routes, ROUTES)
    found.routes[0] = 0
    assert (found.ref, found.status, found.versions, found.layers) == (REF, "partial", ((0, "v"),), CARD.moe_layers)


def test_what_is_asked() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return good(request)

    attempt = attempt_text(attempt_id(1))
    client(handler).get("http://s", Query("run", "a/b c:0:0:0", 2, attempt, (5, 1), 1, 3, 99), 1.5)
    assert seen[0].url.raw_path.split(b"?")[0] == b"/v1/routes/run/a%2Fb%20c%3A0%3A0%3A0"
    assert dict(seen[0].url.params) == {
        "choice": "2", "attempt": attempt, "layers": "5,1", "start": "1", "stop": "3", "min_offset": "99",
        "wait": "1.5", "format": "raw",
    }  # fmt: skip
    assert client(good).head("http://s", QUERY, 0.0).routes.shape == (0, 3, 2)


@pytest.mark.parametrize("name", list(ROUTE_ERRORS))
def test_errors_come_back_as_what_they_are(name: str) -> None:
    kind = ROUTE_ERRORS[name]
    body = json.dumps({"error": name, "detail": "why it is so"})
    with pytest.raises(kind, match="why it is so"):
        client(lambda request: httpx.Response(kind.http, content=body)).get("http://s", QUERY, 0.0)


@pytest.mark.parametrize("content", [b"", b"[1]", b"oops", b'{"error": "strange"}'])
def test_other_answers_are_no_answer(content: bytes) -> None:
    with pytest.raises(StoreUnreachable, match="HTTP 500"):
        client(lambda request: httpx.Response(500, content=content)).get("http://s", QUERY, 0.0)


@pytest.mark.parametrize("name", ["RouteNotYet", "RouteDeleted", "RouteCorrupt", "AmbiguousAttempt", "StoreCatchingUp"])
def test_a_head_has_only_a_status(name: str) -> None:
    with pytest.raises(ROUTE_ERRORS[name]):
        client(lambda request: httpx.Response(ROUTE_ERRORS[name].http)).head("http://s", QUERY, 0.0)


def test_pages() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert dict(request.url.params) == {"run": "run", "prefix": "a", "limit": "5", "after": "x"}
        return httpx.Response(200, json={"rollouts": [REF.to_dict()], "next": "y", "applied": {}})

    page = client(handler).page("http://s", "run", "a", "x", 5)
    assert (page.rollouts, page.next) == ([REF.to_dict()], "y")
    with pytest.raises(StoreUnreachable, match="something else"):
        client(lambda request: httpx.Response(200, json=[])).page("http://s", "run", None, None, 5)


def test_a_refused_argument_is_named() -> None:
    body = b'{"error": "InvalidInput", "detail": "layers: layer 9 is not there"}'
    with pytest.raises(InvalidInput, match="layers: layer 9"):
        client(lambda request: httpx.Response(400, content=body)).get("http://s", QUERY, 0.0)


def test_no_connection_is_unreachable() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(StoreUnreachable, match=r"run/a/b c:0:0:0#2: http://s does not answer: refused"):
        client(handler).get("http://s", QUERY, 0.0)


def test_a_body_that_is_not_as_announced_is_never_passed_on() -> None:
    def short(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, headers={**ANSWER.to_headers(), "content-length": "30"}, stream=_Stream(ROUTES.tobytes()[:9])
        )

    def long(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={**ANSWER.to_headers(), "content-length": "30"}, stream=_Stream(b"x" * 31))

    def other(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=ANSWER.to_headers(), content=b"x" * 12)

    def bare(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=ROUTES.tobytes())

    with pytest.raises(StoreUnreachable, match="ended after 9 of 30"):
        client(short).get("http://s", QUERY, 0.0)
    with pytest.raises(RouteCorrupt, match="more than"):
        client(long).get("http://s", QUERY, 0.0)
    with pytest.raises(RouteCorrupt, match="12 bytes where its rows have 30"):
        client(other).get("http://s", QUERY, 0.0)
    with pytest.raises(RouteCorrupt, match="moebus-status"):
        client(bare).get("http://s", QUERY, 0.0)


class _Stream(httpx.SyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self):  # type: ignore[no-untyped-def]
        yield self._content
