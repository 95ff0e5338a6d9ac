"""A hand on the wire between a client and an S3 server: answers can be held back, late, or replaced."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_DENIED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>%s</Code><Message>%s</Message><RequestId>1</RequestId></Error>"""


class S3Proxy:
    """`url` is what a client takes for the server. `answered` counts what the server did, by method."""

    def __init__(self, endpoint: str) -> None:
        self._target = urlsplit(endpoint).netloc
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self.delay = 0.0
        self.refuse: tuple[int, bytes, bytes] | None = None
        """(status, code, message) of the answer to everything; the server is not asked."""
        self.answered: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        """Answers that wait, by method: the server has done what was asked."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def hold(self) -> None:
        """From now on no answer arrives."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def ask(self, handler: BaseHTTPRequestHandler) -> tuple[int, list[tuple[str, str]], bytes]:
        """What the server says, when it may be said."""
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        if self.refuse is not None:
            status, code, message = self.refuse
            return status, [("content-type", "application/xml")], _DENIED % (code, message)
        connection = http.client.HTTPConnection(self._target, timeout=30)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "connection"}
        connection.request(handler.command, handler.path, body, headers)
        response = connection.getresponse()
        data = response.read()
        found = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP]
        connection.close()
        with self._lock:
            self.answered[handler.command] += 1
            self.held[handler.command] += 1
        if self.delay:
            time.sleep(self.delay)  # the server's slowness is what is tested
        self._open.wait(60)
        with self._lock:
            self.held[handler.command] -= 1
        return response.status, found, data

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                status, headers, data = proxy.ask(self)
                try:
                    self.send_response(status)
                    for name, value in headers:
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(data)
                except OSError:  # who asked is gone
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, format: str, *args: object) -> None:
                return None

        return Handler


_HOP = ("content-length", "transfer-encoding", "connection")
