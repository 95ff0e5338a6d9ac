"""HTTP client of one route store at a time. Thread-safe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

import numpy as np

from moebus.consumers.reader.ask import Query
from moebus.consumers.reader.connections import UNREACHABLE, Connections, Http, Reply
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.rollout import Rollout
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import CheckLevel, check_ids, rows_checksum
from moebus.schemas.route_answer import RouteAnswer
from moebus.schemas.route_errors import (
    ROUTE_ERRORS,
    AmbiguousAttempt,
    RouteCorrupt,
    RouteDeleted,
    RouteError,
    RouteNotYet,
    StoreCatchingUp,
    route_error,
)

_SLICE_BYTES = 512 << 10
READ_SECONDS = 15.0
"""How long a store may be silent beyond the time that it was allowed to wait."""
_BY_STATUS: dict[int, type[RouteError]] = {
    404: RouteNotYet,
    409: AmbiguousAttempt,
    410: RouteDeleted,
    422: RouteCorrupt,
    503: StoreCatchingUp,
}
_Params = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class StorePage:
    """`rollouts`: one object for each whole attempt (the fields of its RouteRef, group, status, epoch, partition,
    at_ms). `next`: the cursor of the page after this one, None after the last."""

    rollouts: list[dict[str, Any]]
    next: str | None


class StoreClient:
    """Connections to any number of stores, kept open between requests."""

    def __init__(self, http: Http | None = None, checks: CheckLevel = "off") -> None:
        """`checks`: above "off" the ids of rows are looked at while the rest of them is still on its way; with "ids"
        not again where the store did so and a checksum says that the rows are the same."""
        self._http: Http = http or Connections()
        self._checks: CheckLevel = checks

    def get(self, url: str, query: Query, wait: float) -> Rollout:
        """The rows asked for; the store may wait up to `wait` seconds for them.

        Raises:
            InvalidInput: the store refuses an argument.  RouteError: its subclasses, StoreUnreachable among them.
        """
        return self._fetch("GET", url, query, wait)

    def head(self, url: str, query: Query, wait: float) -> Rollout:
        """As `get` without the rows: `routes` has none. What is deleted and what never comes cannot be told apart."""
        return self._fetch("HEAD", url, query, wait)

    def page(self, url: str, run: str, prefix: str | None, after: str | None, limit: int) -> StorePage:
        """Whole attempts of a run that this store holds, below `prefix` (None: all), behind the cursor `after`.

        Raises:
            InvalidInput, RouteError: as `get`.
        """
        given: dict[str, str | None] = {"run": run, "prefix": prefix, "after": after, "limit": str(limit)}
        params = {name: value for name, value in given.items() if value is not None}
        said = self._object(url, f"/v1/routes?{urlencode(params)}")
        try:
            return StorePage([dict(entry) for entry in said["rollouts"]], said["next"])
        except (KeyError, TypeError, ValueError) as exc:
            raise StoreUnreachable(f"{url} answers with something else than a page of rollouts") from exc

    def figures(self, url: str) -> dict[str, dict[str, object]]:
        """What a store says of each partition that it follows (the keys are their numbers).

        Raises:
            RouteError: StoreCatchingUp, StoreUnreachable.
        """
        said = self._object(url, "/v1/store").get("partitions")
        if not isinstance(said, dict):
            raise StoreUnreachable(f"{url} answers with something else than its figures")
        return said

    def close(self) -> None:
        self._http.close()

    def _object(self, url: str, path: str) -> dict[str, Any]:
        try:
            with self._http.open("GET", url, path, READ_SECONDS) as reply:
                status, body = reply.status, reply.read()
        except UNREACHABLE as exc:
            raise StoreUnreachable(f"{url} does not answer: {exc or type(exc).__name__}") from exc
        if status != 200:
            _refuse(status, body, url)
        return _object(body)

    def _fetch(self, method: str, url: str, query: Query, wait: float) -> Rollout:
        path, names = rollout_path(query.run, query.rollout_id)
        asked = f"{path}?{urlencode({**names, **_params(query, wait)})}"
        try:
            with self._http.open(method, url, asked, READ_SECONDS + wait) as reply:
                if reply.status != 200:
                    _refuse(reply.status, reply.read(), f"{query} at {url}")
                return _rollout(url, reply, self._checks, rows=method == "GET")
        except UNREACHABLE as exc:
            raise StoreUnreachable(f"{query}: {url} does not answer: {exc or type(exc).__name__}") from exc


def rollout_path(run: str, rollout_id: str) -> tuple[str, _Params]:
    """Path and query parameters of a rollout, at a store or a gateway. An id with a part `.` or `..`, or a line
    break, goes into the query: a path would lose it on its way."""
    if {".", ".."} & {run, *rollout_id.split("/")} or "\n" in rollout_id:
        return "/v1/rollout", {"run": run, "rollout_id": rollout_id}
    return f"/v1/routes/{quote(run, safe='')}/{quote(rollout_id, safe='')}", {}


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
    if query.partition is not None:
        params["partition"] = query.partition
    return params


def _rollout(url: str, reply: Reply, checks: CheckLevel, *, rows: bool) -> Rollout:
    try:
        answer = RouteAnswer.from_headers(reply.headers)
    except InvalidInput as exc:
        raise RouteCorrupt(f"the answer of {url} cannot be read: {exc}") from exc
    routes = _body(url, reply, answer, checks) if rows else np.empty((0, *answer.shape[1:]), answer.dtype)
    return Rollout(
        ref=answer.ref, routes=routes, layers=answer.layers, top_k=answer.top_k, num_experts=answer.num_experts,
        status=answer.status, finish_reason=answer.finish_reason, epoch=answer.epoch, versions=answer.versions,
        card_digest=answer.card_digest, start=answer.start,
    )  # fmt: skip


def _body(url: str, reply: Reply, answer: RouteAnswer, checks: CheckLevel) -> RouteArray:
    """The rows, writable; nothing larger than the length that both headers agree on is taken in."""
    length = reply.headers.get("content-length")
    if length != str(answer.nbytes):
        raise RouteCorrupt(f"{url} sends {length} bytes where its rows have {answer.nbytes}")
    routes: RouteArray = np.empty(answer.shape, answer.dtype)
    step = max(1, _SLICE_BYTES // max(1, answer.nbytes // max(1, answer.rows)))
    known = answer.checksum is not None and checks == "ids" and answer.checked != "off"
    fault: str | None = None
    for first in range(0, answer.rows, step):
        part = routes[first : first + step]
        filled = reply.fill(_memory(part))
        if filled != part.nbytes:  # deleted while it was read: the next question hears so
            ended = routes[:first].nbytes + filled
            raise HTTPException(f"the answer ended after {ended} of {answer.nbytes} bytes")
        if checks != "off" and not known:
            fault = fault or _fault(part, answer)
        if fault is not None and answer.checksum is None:
            break
    if answer.checksum is not None and rows_checksum([_memory(routes)]) != answer.checksum:
        raise HTTPException("what arrived is not what it sent (checksum)")  # asked again, or of another store
    if fault is not None:
        raise RouteCorrupt(f"{answer.ref.key}: {fault}")
    return routes


def _memory(rows: RouteArray) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def _fault(part: RouteArray, answer: RouteAnswer) -> str | None:
    """What is wrong with some of the rows."""
    try:
        check_ids(part, answer.num_experts)
    except InvalidInput as exc:
        return exc.reason
    return None


def _refuse(status: int, body: bytes, what: str) -> NoReturn:
    said = _object(body)
    name, detail = str(said.get("error", "")), str(said.get("detail") or f"HTTP {status}")
    if name in ROUTE_ERRORS:
        raise route_error(name, detail)
    if not body and status in _BY_STATUS:  # the answer to a HEAD
        raise _BY_STATUS[status](f"{what}: HTTP {status}")
    if status == 400:
        field, colon, reason = detail.partition(": ")
        raise InvalidInput(field if colon else "query", reason or detail)
    raise StoreUnreachable(f"{what}: HTTP {status} {name} {detail}")


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
