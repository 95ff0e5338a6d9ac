"""EngineServer: the calls an adapter makes to a rollout server, and what a failed one means.

Two rules. Every call has a connection of its own, so that a refused connection proves that nothing was asked. Looks
(`look`) have a pool of their own and a short limit: they answer also while a long call runs.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from pydantic import SecretStr

from moebus.engine.http.address import check_url
from moebus.engine.http.answers import Reply, decoded, failed, words
from moebus.engine.port import (
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnknown,
    EngineUnreachable,
    Unsupported,
)

LOOK_S = 0.4
PATIENCE_S = 5.0
"""How long a server may be too busy to answer before that is said of it."""
CONNECT_S = 5.0
LONGEST_CALL_S = 3600.0
"""What a call without a deadline may take: longer, and its server counts as hung."""
MAX_ANSWER_BYTES = 32 << 20
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class EngineServer:
    """One server. Thread-safe.

    `token` goes as a bearer token with every request and into no message. `transport` is for tests.
    """

    def __init__(
        self, url: str, token: SecretStr | None = None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        """Connects to nothing. Raises InvalidInput: `url`."""
        self.url = check_url(url)
        headers = {} if token is None else {"Authorization": f"Bearer {token.get_secret_value()}"}
        limits = httpx.Limits(max_keepalive_connections=0)
        # The machine's certificates and SSL_CERT_FILE; slow to load, so only where they are needed.
        tls = ssl.create_default_context() if self.url.startswith("https:") else False
        self._calls, self._looks = (
            httpx.Client(
                base_url=self.url, headers=headers, limits=limits, transport=transport, trust_env=False, verify=tls
            )
            for _ in range(2)
        )
        self._lock = threading.Lock()
        self._trouble: str | None = "not reached yet"
        self._losses = 0
        self.answered = 0
        """Calls with an effect that were answered well."""
        self._answered = False
        self._late_since: float | None = None

    @property
    def trouble(self) -> str | None:
        """Why the server does not answer, for people; None while it does. One that takes connections and is late is
        said to be in trouble after `PATIENCE_S` of it."""
        late = self._late_since
        if self._trouble is None and late is not None and time.monotonic() - late >= PATIENCE_S:
            return f"{self.url} has not answered for {time.monotonic() - late:.0f} s"
        return self._trouble

    @property
    def losses(self) -> int:
        """How often a server that had answered took no connection or cut one."""
        return self._losses

    def call(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        needs: str = "",
        on_sent: Callable[[], None] | None = None,
    ) -> Reply:
        """A call with an effect. `needs`: what a server must be started with to have `path`. `on_sent` is called, on
        this thread, once the request has left.

        Raises:
            EngineTimeout: the deadline had passed; nothing was sent.
            EngineUnreachable: no connection; nothing was sent.
            EngineUnauthorized, EngineRefused: 401 or 403, 400, 409 or 422; nothing was done.
            Unsupported: the server has no such path (404, 405, 501).
            EngineFailed: any other error, also one behind a 200.
            EngineUnknown: the connection broke, or the deadline passed, after it was sent.
        """
        left = min(deadline.remaining(), LONGEST_CALL_S)
        if left <= 0:
            raise EngineTimeout(f"{path}: the deadline had passed before the call; nothing was done")
        reply = self._send(self._calls, method, path, left, params, json, needs, on_sent)
        self.answered += method != "GET"
        return reply

    def look(
        self, path: str, within: float = LOOK_S, *, params: Mapping[str, Any] | None = None, needs: str = ""
    ) -> Reply:
        """A GET without an effect, answered within `within` seconds.

        Raises:
            EngineUnreachable: no answer.  Others as `call`.
        """
        try:
            return self._send(self._looks, "GET", path, max(within, 0.001), params, None, needs, None)
        except EngineUnknown as error:
            raise EngineUnreachable(str(error)) from error

    def close(self) -> None:
        self._calls.close()
        self._looks.close()

    def _send(
        self,
        client: httpx.Client,
        method: str,
        path: str,
        left: float,
        params: Mapping[str, Any] | None,
        json: Any,
        needs: str,
        on_sent: Callable[[], None] | None,
    ) -> Reply:
        until = time.monotonic() + left
        extensions = {} if on_sent is None else {"trace": _when_sent(on_sent)}
        timeout = httpx.Timeout(left, connect=min(left, CONNECT_S))
        try:
            with client.stream(
                method, path, params=params, json=json, timeout=timeout, extensions=extensions
            ) as response:
                raw = _body(response, until)
                status = response.status_code
        except _NOT_SENT as error:
            raise self._lost(EngineUnreachable(f"{self.url} takes no connection ({_why(error)})")) from error
        except httpx.TimeoutException as error:
            self._late_since = self._late_since or time.monotonic()
            raise EngineUnknown(f"{path}: no answer within {left:.1f} s; it may have been done", late=True) from error
        except httpx.HTTPError as error:
            text = f"{path}: the connection broke ({_why(error)}); it may have been done"
            raise self._lost(EngineUnknown(text)) from error
        self._trouble, self._answered, self._late_since = None, True, None
        return self._judged(path, status, raw, needs)

    def _lost(self, error: EngineUnreachable | EngineUnknown) -> EngineUnreachable | EngineUnknown:
        with self._lock:
            self._losses += self._answered or isinstance(error, EngineUnknown)
            self._trouble, self._answered = str(error), False
        return error

    def _judged(self, path: str, status: int, raw: bytes, needs: str) -> Reply:
        body = decoded(raw)
        said = words(body, raw[:2000].decode(errors="replace"))
        if status in (401, 403):
            raise EngineUnauthorized(f"{path}: the server refused the token ({status}); see --engine-token-file")
        if status in (404, 405, 501):
            hint = f"; start it with {needs}" if needs else ""
            raise Unsupported(f"{path}: the server has no such call ({status}){hint}")
        if status in (400, 409, 422):
            raise EngineRefused(f"{path}: {said or 'refused'} ({status})")
        if status >= 300:
            raise EngineFailed(f"{path}: {said or 'failed'} ({status})")
        if failed(body):
            raise EngineFailed(f"{path}: {said or 'failed'} (in an answer with number {status})")
        return Reply(status, body, raw.decode(errors="replace") if body is None else "")


def _body(response: httpx.Response, until: float) -> bytes:
    """The body, bounded in size and time: each read alone is within the timeout, all of them together may not be."""
    parts: list[bytes] = []
    size = 0
    for part in response.iter_bytes():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise httpx.RemoteProtocolError(f"an answer above {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > until:
            raise httpx.ReadTimeout("the answer did not end in time")
        parts.append(part)
    return b"".join(parts)


def _when_sent(then: Callable[[], None]) -> Callable[[str, Mapping[str, Any]], None]:
    def trace(event: str, info: Mapping[str, Any]) -> None:
        if event.endswith("send_request_body.complete"):
            then()

    return trace


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
