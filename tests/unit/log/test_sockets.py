"""The sockets of our Kafka clients."""

from __future__ import annotations

import socket
import ssl
from types import SimpleNamespace

import pytest

from moebus.broker.kafka.sockets import DIRECT, PIECE, DirectSocket, WideSocket, tls_context


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


def test_what_comes_with_the_end_is_taken_first() -> None:
    """The client gives up at the end of a stream and forgets what it had received until then."""
    from kafka.net.transport import KafkaTCPTransport  # after ours, which keeps its warnings quiet

    maker = DirectSocket(DIRECT)
    with socket.create_server(("127.0.0.1", 0)) as server, maker.socket(socket.AF_INET) as client:
        client.connect(server.getsockname())
        other, _ = server.accept()
        other.sendall(b"why not")
        other.close()
        assert client.recv(7, socket.MSG_PEEK) == b"why not"  # it is there, and so is the end
        client.setblocking(False)
        transport = SimpleNamespace(_sock=client)
        assert KafkaTCPTransport._sock_recv(transport) == (b"why not", None)
        received, error = KafkaTCPTransport._sock_recv(transport)
        assert received == b""
        assert "disconnected" in str(error)


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


def test_a_handshake_that_fails_closes_its_socket() -> None:
    context = tls_context(None, None, None)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        other, _ = server.accept()
        client.setblocking(False)
        wrapped = context.wrap_socket(client, server_hostname="localhost", do_handshake_on_connect=False)
        with other:
            with pytest.raises(ssl.SSLWantReadError):
                wrapped.do_handshake()
            assert wrapped.fileno() >= 0, "it goes on later"
            other.sendall(b"no tls\n" * 10)
            wrapped.settimeout(10)
            with pytest.raises(ssl.SSLError):
                wrapped.do_handshake()
        assert wrapped.fileno() == -1
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)
    with pytest.raises(OSError, match="No such file"):
        tls_context("/none/ca.pem", None, None)
