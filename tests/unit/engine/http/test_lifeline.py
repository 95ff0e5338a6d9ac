"""A connection that nobody uses ends with the server's process."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from moebus.engine.http.lifeline import Lifeline
from tests.support.wait import wait_until


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def line_to(server: socket.socket) -> Lifeline:
    return Lifeline(f"http://127.0.0.1:{server.getsockname()[1]}")


def test_it_counts_connections_that_ended(server: socket.socket) -> None:
    line = line_to(server)
    assert line.losses() == 0
    first, _ = server.accept()
    assert line.losses() == 0
    first.close()
    wait_until(lambda: line.losses() == 1, 30, "the end of the first")
    second, _ = server.accept()
    assert line.losses() == 1
    second.sendall(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    wait_until(lambda: line.losses() == 2, 30, "words that nobody asked for")
    second.close()
    line.close()


def test_a_reset_is_an_end(server: socket.socket) -> None:
    line = line_to(server)
    line.losses()
    taken, _ = server.accept()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    taken.close()
    wait_until(lambda: line.losses() == 1, 30, "the reset")
    line.close()


def test_a_server_that_takes_none_adds_nothing(server: socket.socket) -> None:
    line = line_to(server)
    line.losses()
    server.accept()[0].close()
    server.close()
    wait_until(lambda: line.losses() == 1, 30, "the end")
    assert [line.losses() for _ in range(3)] == [1, 1, 1]
    line.close()


def test_over_tls_and_after_its_close_there_is_none(server: socket.socket) -> None:
    tls = Lifeline(f"https://127.0.0.1:{server.getsockname()[1]}")
    assert tls.losses() == 0
    line = line_to(server)
    line.close()
    assert line.losses() == 0
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.accept()
