"""The sockets of our Kafka clients."""

from __future__ import annotations

import socket
import ssl

import pytest

from moebus.broker.kafka.sockets import DIRECT, PIECE, DirectSocket, WideSocket


def test_one_read_takes_all_that_is_there_up_to_the_piece() -> None:
    maker = DirectSocket(DIRECT)
    with socket.create_server(("127.0.0.1", 0)) as server, maker.socket(socket.AF_INET) as client:
        assert isinstance(client, WideSocket)
        client.connect(server.getsockname())
        other, _ = server.accept()
        with other:
            other.sendall(b"x" * 100_000)
            got = b""
            client.settimeout(10)
            reads = 0
            while len(got) < 100_000:  # kafka-python asks for 4,096 bytes
                got += client.recv(4096)
                reads += 1
            assert reads < 100_000 / 4096 / 2
            assert PIECE >= 100_000


def test_tls_can_be_put_around_it() -> None:
    maker, context = DirectSocket(DIRECT), ssl.create_default_context()
    with socket.create_server(("127.0.0.1", 0)) as server, maker.socket(socket.AF_INET) as client:
        client.connect(server.getsockname())
        other, _ = server.accept()
        with (
            other,
            context.wrap_socket(client, server_hostname="localhost", do_handshake_on_connect=False) as wrapped,
        ):
            assert not isinstance(wrapped, WideSocket)
            other.sendall(b"no tls\n" * 10)
            wrapped.settimeout(10)
            with pytest.raises(ssl.SSLError):
                wrapped.do_handshake()
