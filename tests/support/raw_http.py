"""A loopback server that answers exactly what a test says: also too little, too much, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Said:
    """An answer. Without a content-length among the headers, that of the body; `hang_up`: the connection ends then."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    hang_up: bool = False


@dataclass
class Raw:
    """`seen`: method and path of each request; `connections`: how many were opened."""

    url: str
    seen: list[tuple[str, str]] = field(default_factory=list)
    connections: int = 0

    def query(self, number: int = -1) -> dict[str, str]:
        """Of a request seen."""
        return {name: values[0] for name, values in parse_qs(urlsplit(self.seen[number][1]).query).items()}


@contextmanager
def answering(answer: Callable[[], Said]) -> Iterator[Raw]:
    """`answer()` gives what the next request gets."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # a small answer leaves whole

        def setup(self) -> None:
            super().setup()
            raw.connections += 1

        def handle_any(self) -> None:
            raw.seen.append((self.command, self.path))
            said = answer()
            self.send_response(said.status)
            for name, value in {"content-length": str(len(said.body)), **said.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said.body)
            self.wfile.flush()
            self.close_connection = said.hang_up

        do_GET = do_HEAD = handle_any

        def log_message(self, format: str, *args: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    raw = Raw(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield raw
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
