"""The store's HTTP: reading, listing, deleting, figures.

GET|HEAD /v1/routes/{run}/{rollout_id}?choice=&attempt=&group=&partition=&layers=&start=&stop=&format=&min_offset=&wait=
GET|HEAD /v1/rollout?run=&rollout_id=&...            the same, for ids that a path cannot carry
GET      /v1/routes?run=&prefix=&limit=&after=
DELETE   /v1/routes?run=&prefix=&epoch=&timeout=
GET      /v1/store

Ids are URL-encoded. HTTP clients and proxies take `.` and `..` out of paths, encoded or not, so an id with such a part
is asked for with the second form. `min_offset` needs `partition` or `group`. Errors are
`{"error": name, "detail": sentence}` with the status of `moebus.schemas.route_errors`; 400 InvalidInput for what
cannot be asked, 503 BrokerUnavailable where a delete is not acknowledged.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from itertools import chain

from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from moebus.consumers.store import params
from moebus.consumers.store.answers import Answer, Question, position, ref_of
from moebus.consumers.store.state import AttemptState
from moebus.consumers.store.store import RouteStore
from moebus.consumers.store.waking import LONGEST, Changes
from moebus.schemas.attempt import attempt_text
from moebus.schemas.errors import InvalidInput, MoebusError, RetriableError
from moebus.schemas.route_errors import RouteError, RouteNotYet, StoreCatchingUp

MOST_AT_ONCE = 4 << 20
"""Bytes of rows up to which an answer is read whole before it is sent: a larger one goes out chunk by chunk."""
Current = Callable[[], "RouteStore | None"]
Handler = Callable[[Request], Awaitable[Response]]


def store_routes(current: Current) -> list[BaseRoute]:
    """`current`: the store of this process, None while it is not made yet (answers 503 then)."""
    register_url_convertor("rollout", _AnyText())
    pages = _Pages(current)
    return [
        Route("/v1/routes/{run}/{rollout_id:rollout}", _answered(pages.rollout), methods=["GET"]),
        Route("/v1/rollout", _answered(pages.rollout), methods=["GET"]),
        Route("/v1/routes", _answered(pages.listing), methods=["GET"]),
        Route("/v1/routes", _answered(pages.delete), methods=["DELETE"]),
        Route("/v1/store", _answered(pages.figures), methods=["GET"]),
    ]


class _AnyText(Convertor[str]):
    """The rest of the path, whatever it holds (Starlette's own ends at a newline)."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _Pages:
    def __init__(self, current: Current) -> None:
        self._current = current

    async def rollout(self, request: Request) -> Response:
        asked = params.rollout(request.path_params, _query(request))
        has_body = request.method != "HEAD"
        answer, whole = await self._wait(asked.question, asked.wait, MOST_AT_ONCE if has_body else 0)
        head = answer.header(asked.form)
        headers = {
            **answer.meta.to_headers(),
            "content-length": str(len(head) + answer.meta.nbytes),
            "content-type": "application/octet-stream",
        }
        if not has_body:
            return Response(headers=headers)
        if whole is not None:
            return Pieces([head, *whole], headers)
        body = answer.rows()
        first = await run_in_threadpool(next, body, memoryview(b""))  # a fault of the first chunk is still a status
        return StreamingResponse(chain((head, first), body), headers=headers)

    async def listing(self, request: Request) -> Response:
        asked = params.listing(_query(request))
        store = self._store()
        if not asked.after:
            await self._catch_up(store)
        found = await run_in_threadpool(store.page, asked.run, asked.prefix, asked.after, asked.limit)
        last = position(found[-1][1]) if len(found) == asked.limit else None
        return JSONResponse(
            {
                "rollouts": [_entry(number, state) for number, state in found],
                "next": base64.urlsafe_b64encode(last).decode() if last else None,
                "applied": {str(number): lag.applied for number, lag in store.progress.lags().items()},
            }
        )

    async def delete(self, request: Request) -> Response:
        asked = params.delete(_query(request))
        identity, offsets = await run_in_threadpool(
            self._store().delete, asked.run, asked.prefix, asked.epoch, asked.timeout
        )
        return JSONResponse(
            {
                "id": attempt_text(identity), "run": asked.run, "prefix": asked.prefix, "epoch": asked.epoch,
                "offsets": {str(number): offset for number, offset in offsets.items()},
            }
        )  # fmt: skip

    async def figures(self, request: Request) -> Response:
        params.only(_query(request), ())
        store = self._store()
        runs = await run_in_threadpool(store.runs)
        partitions = {
            str(number): {
                "applied": lag.applied, "end": lag.end, "lag": max(0, lag.end - lag.applied), "full": lag.full,
                "rollouts": held.whole, "used_bytes": held.used_bytes, "map_bytes": held.map_bytes,
                "last_append_ms": held.now_ms,
                "runs": [asdict(one) for one in runs.get(number, [])],
            }
            for number, (lag, held) in store.figures().items()
        }  # fmt: skip
        return JSONResponse({"waiting": store.waiting(), "partitions": partitions})

    def _store(self) -> RouteStore:
        store = self._current()
        if store is None:
            raise StoreCatchingUp("the store is starting")
        return store

    async def _catch_up(self, store: RouteStore) -> None:
        """Until listings show all that can be read now: what was read a moment ago must not be missing from them. A
        commit takes milliseconds; one that does not come is not waited for."""
        is_committed = store.committed()
        deadline = store.clock.monotonic() + LONGEST
        with Changes(store.progress, None) as changes:
            while not is_committed() and (left := deadline - store.clock.monotonic()) > 0:
                await changes.wait(left)
                changes.clear()

    async def _wait(self, question: Question, seconds: float, most: int) -> tuple[Answer, list[memoryview] | None]:
        """The answer, and its rows where they have at most `most` bytes. Asks again after every commit, as long as
        the answer may still change."""
        store = self._store()
        deadline = store.clock.monotonic() + seconds
        with Changes(store.progress, question.partition, question.key) as changes:
            while True:
                changes.clear()
                try:
                    with store.courtesy.answering():
                        return await run_in_threadpool(_read, store, question, most)
                except (RouteNotYet, StoreCatchingUp):
                    left = deadline - store.clock.monotonic()
                    if left <= 0:
                        raise
                await changes.wait(left)


def _read(store: RouteStore, question: Question, most: int) -> tuple[Answer, list[memoryview] | None]:
    answer = store.find(question)
    return answer.read() if answer.meta.nbytes <= most else (answer, None)


class Pieces(Response):
    """Bytes that are all there, sent one after the other without putting them together."""

    def __init__(self, pieces: Sequence[bytes | memoryview], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _query(request: Request) -> dict[str, str]:
    return params.once(request.query_params.multi_items())


def _entry(number: int, state: AttemptState) -> dict[str, object]:
    end = state.end
    assert end is not None
    return {**ref_of(state).to_dict(), "group": state.header.group, "status": end.status, "epoch": state.header.epoch,
            "partition": number, "at_ms": state.at_ms}  # fmt: skip


def _answered(handler: Handler) -> Handler:
    """Errors as bodies."""

    @wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RouteError as error:
            return _error(error.name, str(error), error.http)
        except InvalidInput as error:
            return _error("InvalidInput", str(error), 400)
        except RetriableError as error:
            return _error(type(error).__name__, str(error), 503)
        except MoebusError as error:
            return _error(type(error).__name__, str(error), 500)

    return handle


def _error(name: str, detail: str, status: int) -> Response:
    return JSONResponse({"error": name, "detail": detail}, status_code=status)
