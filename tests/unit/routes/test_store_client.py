"""StoreClient against answers made by hand: what is asked, what is believed, how connections are used."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from moebus.consumers.reader.ask import Query
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.store_client import StoreClient
from moebus.schemas.attempt import attempt_text
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import CheckLevel, rows_checksum
from moebus.schemas.route_answer import RouteAnswer
from moebus.schemas.route_errors import ROUTE_ERRORS, RouteCorrupt
from moebus.schemas.route_ref import RouteRef
from tests.support.raw_http import Raw, Said, answering
from tests.support.routes import CARD, attempt_id, make_routes
from tests.support.wait import wait_until

REF = RouteRef("run", "a/b c:0:0:0", 2, attempt_text(attempt_id(1)), 5)
ROUTES = make_routes(5)
ANSWER = RouteAnswer(REF, 0, 5, CARD.moe_layers, CARD.top_k, CARD.num_experts, "partial", versions=((0, "v"),))
QUERY = Query("run", "a/b c:0:0:0", 2)
GOOD = Said(200, ROUTES.tobytes(), ANSWER.to_headers())


@contextmanager
def asking(said: Said | Callable[[], Said]) -> Iterator[tuple[StoreClient, Raw]]:
    with answering(said if callable(said) else lambda: said) as raw:
        client = StoreClient()
        try:
            yield client, raw
        finally:
            client.close()


def test_rows_come_back_equal_and_writable() -> None:
    with asking(GOOD) as (client, raw):
        found = client.get(raw.url, QUERY, 0.0)
    assert np.array_equal(found.routes, ROUTES)
    found.routes[0] = 0
    assert (found.ref, found.status, found.versions, found.layers) == (REF, "partial", ((0, "v"),), CARD.moe_layers)


def test_what_is_asked() -> None:
    attempt = attempt_text(attempt_id(1))
    with asking(GOOD) as (client, raw):
        client.get(raw.url, Query("run", "a/b c:0:0:0", 2, attempt, (5, 1), 1, 3, 99), 1.5)
        assert raw.seen[0][1].split("?")[0] == "/v1/routes/run/a%2Fb%20c%3A0%3A0%3A0"
        assert raw.query() == {
            "choice": "2", "attempt": attempt, "layers": "5,1", "start": "1", "stop": "3", "min_offset": "99",
            "wait": "1.5", "format": "raw",
        }  # fmt: skip
        assert client.head(raw.url, QUERY, 0.0).routes.shape == (0, 3, 2)
        assert raw.seen[1][0] == "HEAD"


@pytest.mark.parametrize("name", list(ROUTE_ERRORS))
def test_errors_come_back_as_what_they_are(name: str) -> None:
    kind = ROUTE_ERRORS[name]
    body = json.dumps({"error": name, "detail": "why it is so"}).encode()
    with asking(Said(kind.http, body)) as (client, raw), pytest.raises(kind, match="why it is so"):
        client.get(raw.url, QUERY, 0.0)


@pytest.mark.parametrize("content", [b"", b"[1]", b"oops", b'{"error": "strange"}'])
def test_other_answers_are_no_answer(content: bytes) -> None:
    with asking(Said(500, content)) as (client, raw), pytest.raises(StoreUnreachable, match="HTTP 500"):
        client.get(raw.url, QUERY, 0.0)


@pytest.mark.parametrize("name", ["RouteNotYet", "RouteDeleted", "RouteCorrupt", "AmbiguousAttempt", "StoreCatchingUp"])
def test_a_head_has_only_a_status(name: str) -> None:
    with asking(Said(ROUTE_ERRORS[name].http)) as (client, raw), pytest.raises(ROUTE_ERRORS[name]):
        client.head(raw.url, QUERY, 0.0)


def test_pages() -> None:
    page = json.dumps({"rollouts": [REF.to_dict()], "next": "y", "applied": {}}).encode()
    with asking(Said(200, page)) as (client, raw):
        found = client.page(raw.url, "run", "a", "x", 5)
        assert raw.query() == {"run": "run", "prefix": "a", "limit": "5", "after": "x"}
    assert (found.rollouts, found.next) == ([REF.to_dict()], "y")
    with asking(Said(200, b"[]")) as (client, raw), pytest.raises(StoreUnreachable, match="something else"):
        client.page(raw.url, "run", None, None, 5)


def test_a_refused_argument_is_named() -> None:
    body = b'{"error": "InvalidInput", "detail": "layers: layer 9 is not there"}'
    with asking(Said(400, body)) as (client, raw), pytest.raises(InvalidInput, match="layers: layer 9"):
        client.get(raw.url, QUERY, 0.0)


def test_no_connection_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StoreUnreachable, match=rf"run/a/b c:0:0:0#2: {url} does not answer: .*refused"):
            StoreClient().get(url, QUERY, 0.0)
    with pytest.raises(StoreUnreachable, match="no http address"):
        StoreClient().get("ftp://s", QUERY, 0.0)


def test_a_body_that_is_not_as_announced_is_never_passed_on() -> None:
    short = Said(200, ROUTES.tobytes()[:9], {**ANSWER.to_headers(), "content-length": "30"}, hang_up=True)
    with asking(short) as (client, raw), pytest.raises(StoreUnreachable, match="ended after 9 of 30"):
        client.get(raw.url, QUERY, 0.0)
    other = Said(200, b"x" * 12, ANSWER.to_headers())
    with asking(other) as (client, raw), pytest.raises(RouteCorrupt, match="12 bytes where its rows have 30"):
        client.get(raw.url, QUERY, 0.0)
    with asking(Said(200, ROUTES.tobytes())) as (client, raw), pytest.raises(RouteCorrupt, match="moebus-status"):
        client.get(raw.url, QUERY, 0.0)
    page = Said(200, b'{"rollouts"', {"content-length": "30"}, hang_up=True)
    with asking(page) as (client, raw), pytest.raises(StoreUnreachable, match="does not answer"):
        client.page(raw.url, "run", None, None, 5)


def test_more_than_was_announced_is_not_taken_for_the_next_answer() -> None:
    long = Said(200, ROUTES.tobytes() + b"HTTP/1.1 200 OK\r\n\r\n", {**ANSWER.to_headers(), "content-length": "30"})
    answers = iter([long, GOOD])
    with asking(lambda: next(answers)) as (client, raw):
        for _ in range(2):
            assert np.array_equal(client.get(raw.url, QUERY, 0.0).routes, ROUTES)


def test_one_connection_serves_many_requests_errors_too() -> None:
    answers = iter([GOOD, Said(404, b'{"error": "RouteNotYet", "detail": "no"}'), GOOD, GOOD])
    with asking(lambda: next(answers)) as (client, raw):
        client.get(raw.url, QUERY, 0.0)
        with pytest.raises(ROUTE_ERRORS["RouteNotYet"]):
            client.get(raw.url, QUERY, 0.0)
        client.head(raw.url, QUERY, 0.0)
        client.get(raw.url, QUERY, 0.0)
        assert raw.connections == 1


def test_a_connection_that_the_store_has_closed_is_opened_again() -> None:
    closing = Said(200, ROUTES.tobytes(), ANSWER.to_headers(), hang_up=True)  # without saying so
    with asking(closing) as (client, raw):
        for _ in range(5):
            assert np.array_equal(client.get(raw.url, QUERY, 0.0).routes, ROUTES)
        wait_until(lambda: raw.connections == 5, what="a connection for each")


def test_rows_are_looked_at_while_they_come() -> None:
    card = ModelCard(256, 8, tuple(range(20)))
    rows = 9_000  # 1.4 MB: several slices
    good = ((np.arange(rows)[:, None, None] * 3 + np.arange(20)[:, None] + np.arange(8) * 7) % 256).astype(np.uint8)
    ref = RouteRef("run", "big", 0, attempt_text(attempt_id(1)), rows)
    headers = RouteAnswer(ref, 0, rows, card.moe_layers, 8, 256, "complete").to_headers()
    bad = good.copy()
    bad[-1, 19, 7] = bad[-1, 19, 0]
    strict, lenient = StoreClient(checks="ids"), StoreClient()
    answers = iter(Said(200, rows.tobytes(), headers) for rows in (good, bad, bad))
    with answering(lambda: next(answers)) as raw:
        assert np.array_equal(strict.get(raw.url, Query("run", "big"), 0.0).routes, good)
        with pytest.raises(RouteCorrupt, match="run/big#0: one expert twice"):
            strict.get(raw.url, Query("run", "big"), 0.0)
        assert np.array_equal(lenient.get(raw.url, Query("run", "big"), 0.0).routes, bad)
        strict.close()
        lenient.close()


def test_what_the_store_looked_at_is_not_looked_at_again_if_a_checksum_says_that_it_is_the_same() -> None:
    bad = ROUTES.copy()
    bad[4] = bad[4, 0, 0]  # one expert twice, to see who looks

    def said(rows: npt.NDArray[np.unsignedinteger], checked: CheckLevel, checksum: bool = True) -> Said:
        held = rows_checksum([rows.tobytes()]) if checksum else None
        return Said(200, bad.tobytes(), replace(ANSWER, checked=checked, checksum=held).to_headers())

    def get(level: CheckLevel, answer: Said) -> bool:
        """Whether the rows came as they are."""
        client = StoreClient(checks=level)
        with answering(lambda: answer) as raw:
            try:
                return np.array_equal(client.get(raw.url, QUERY, 0.0).routes, bad)
            finally:
                client.close()

    assert get("ids", said(bad, "ids"))
    assert get("ids", said(bad, "full"))
    levels: tuple[CheckLevel, ...] = ("off", "ids", "full")
    looked: list[tuple[CheckLevel, Said]] = [
        ("full", said(bad, "full")),  # who asks for more looks by himself
        ("ids", said(bad, "off")),
        ("ids", said(bad, "ids", checksum=False)),
    ]
    for level, answer in looked:
        with pytest.raises(RouteCorrupt, match="twice"):
            get(level, answer)
    for closely in levels:  # spoilt on its way: another store may be asked
        with pytest.raises(StoreUnreachable, match="not what it sent"):
            get(closely, said(ROUTES, "ids"))
