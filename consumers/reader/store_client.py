"""HTTP client of one route store at a time. Thread-safe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn
from urllib.parse import quote

import httpx
import numpy as np

from moebus.consumers.reader.ask import Query
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.rollout import Rollout
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput
from moebus.schemas.route_answer import RouteAnswer
from moebus.schemas.route_errors import ROUTE_ERRORS, RouteCorrupt, route_error

CONNECT_SECONDS = 2.0
READ_SECONDS = 15.0
"""How long a store may be silent beyond the time that it was allowed to wait."""
_Params = dict[str, str | int | float]


class StoreClient:
    """Connections to any number of stores, kept open between requests."""

    def __init__(self, transport: httpx.BaseTransport | None = None) -> None:
        # trust_env=False: stores are addressed directly, never through a proxy of the environment
        self._http = httpx.Client(trust_env=False, transport=transport)

    def get(self, url: str, query: Query, wait: float) -> Rollout:
        """The rows asked for; the store may wait up to `wait` seconds for them.

        Raises:
            InvalidInput: the store refuses an argument.  RouteError: its subclasses, StoreUnreachable among them.
        """
        return self._fetch("GET", url, query, wait)

    def head(self, url: str, query: Query, wait: float) -> Rollout:
        """As `get` without the rows: `routes` has none."""
        return self._fetch("HEAD", url, query, wait)

    def close(self) -> None:
        self._http.close()

    def _fetch(self, method: str, url: str, query: Query, wait: float) -> Rollout:
        target = f"{url}/v1/routes/{quote(query.run, safe='')}/{quote(query.rollout_id, safe='')}"
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS, read=READ_SECONDS + wait)
        try:
            with self._http.stream(method, target, params=_params(query, wait), timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    _refuse(response.status_code, response.headers, response.content, f"{query} at {url}")
                return _rollout(response, rows=method == "GET")
        except (httpx.TransportError, httpx.DecodingError) as exc:
            raise StoreUnreachable(f"{query}: {url} does not answer: {exc or type(exc).__name__}") from exc


def _params(query: Query, wait: float) -> _Params:
    params: _Params = {"choice": query.choice, "format": "raw"}
    if wait > 0:
        params["wait"] = round(wait, 3)
    if query.attempt is not None:
        params["attempt"] = query.attempt
    if query.layers is not None:
        params["layers"] = ",".join(map(str, query.layers))
    if query.start:
        params["start"] = query.start
    if query.stop is not None:
        params["stop"] = query.stop
    if query.min_offset is not None:
        params["min_offset"] = query.min_offset
    return params


def _rollout(response: httpx.Response, *, rows: bool) -> Rollout:
    try:
        answer = RouteAnswer.from_headers(response.headers)
    except InvalidInput as exc:
        raise RouteCorrupt(f"the answer of {response.url} cannot be read: {exc}") from exc
    routes = _body(response, answer) if rows else np.empty((0, *answer.shape[1:]), answer.dtype)
    return Rollout(
        ref=answer.ref, routes=routes, layers=answer.layers, top_k=answer.top_k, num_experts=answer.num_experts,
        status=answer.status, finish_reason=answer.finish_reason, epoch=answer.epoch, versions=answer.versions,
        card_digest=answer.card_digest, start=answer.start,
    )  # fmt: skip


def _body(response: httpx.Response, answer: RouteAnswer) -> RouteArray:
    """The rows, writable; nothing larger than the length that both headers agree on is taken in."""
    if response.headers.get("content-length") != str(answer.nbytes):
        length = response.headers.get("content-length")
        raise RouteCorrupt(f"{response.url} sends {length} bytes where its rows have {answer.nbytes}")
    body = bytearray(answer.nbytes)
    filled = 0
    for piece in response.iter_raw():
        if filled + len(piece) > len(body):
            raise RouteCorrupt(f"{response.url} sends more than the {len(body)} bytes it announced")
        body[filled : filled + len(piece)] = piece
        filled += len(piece)
    if filled != len(body):  # deleted while it was read: the next question hears so
        raise httpx.RemoteProtocolError(f"the answer ended after {filled} of {len(body)} bytes")
    flat: RouteArray = np.frombuffer(body, answer.dtype)
    return flat.reshape(answer.shape)


def _refuse(status: int, headers: Mapping[str, str], body: bytes, what: str) -> NoReturn:
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    said = said if isinstance(said, dict) else {}
    name = str(said.get("error") or headers.get("moebus-error", ""))
    detail = str(said.get("detail") or f"HTTP {status}")
    if name in ROUTE_ERRORS:
        raise route_error(name, detail)
    if status == 400:
        raise InvalidInput(str(said.get("field", "query")), detail)
    raise StoreUnreachable(f"{what}: HTTP {status} {name} {detail}".rstrip())
