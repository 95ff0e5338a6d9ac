"""The sockets of our Kafka clients."""

from __future__ import annotations

import select
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of localhost, with its key, signed by itself."""
    made = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(made), "-out", str(made)],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@contextmanager
def plain_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Ours, and the peer's end."""
    with socket.create_server(("127.0.0.1", 0)) as server, DirectSocket(DIRECT).socket(socket.AF_INET) as client:
        client.connect(server.getsockname())
        other, _ = server.accept()
        with other:
            client.setblocking(False)
            yield client, other


@contextmanager
def tls_pair(certificate: Path) -> Iterator[tuple[socket.socket, ssl.SSLSocket]]:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    with plain_pair() as (client, other), ThreadPoolExecutor(1) as pool:
        peer = pool.submit(server_side.wrap_socket, other, server_side=True)
        client.setblocking(True)
        ours = tls_context(str(certificate), None, None).wrap_socket(client, server_hostname="localhost")
        with ours, peer.result(10) as theirs:
            ours.setblocking(False)
            yield ours, theirs


def received(client: socket.socket) -> tuple[bytes, str]:
    """What one wait and one read of the client gives, and why it gives up after that."""
    from kafka.net.transport import KafkaSSLTransport  # after ours, which keeps its warnings quiet

    readable, _, _ = select.select([client], [], [], 5)
    assert readable, "nothing wakes the client up"
    data, error = KafkaSSLTransport._sock_recv(SimpleNamespace(_sock=client))
    return data, str(error) if error is not None else ""


def until_the_end(client: socket.socket) -> tuple[bytes, str]:
    """All data that reached the client, and the error at which it gave up."""
    whole = b""
    for _ in range(10):  # a session ticket of TLS wakes it up for nothing
        data, error = received(client)
        if error:
            return whole, error  # what came with the error is thrown away
        whole += data
    return whole, ""


def test_what_comes_with_the_end_is_taken_first() -> None:
    """The client gives up at the end of a stream and forgets what it received in the same go."""
    with plain_pair() as (client, other):
        other.sendall(b"why not")
        other.close()
        data, error = until_the_end(client)
        assert data == b"why not"
        assert "disconnected" in error


@pytest.mark.parametrize("connection", ["closed", "left open"])
def test_what_comes_with_the_end_of_tls_is_taken_first(certificate: Path, connection: str) -> None:
    with tls_pair(certificate) as (client, other):
        other.sendall(b"why not")
        with ThreadPoolExecutor(1) as pool, client:
            ended = pool.submit(other.unwrap)  # it says that it ends, and waits for the same from us
            if connection == "closed":
                other.shutdown(socket.SHUT_WR)
            data, error = until_the_end(client)
            assert data == b"why not"
            assert "disconnected" in error
        with suppress(OSError):
            ended.result(10)


def test_the_end_is_told_at_once_where_nothing_came_before() -> None:
    with plain_pair() as (client, other):
        other.sendall(b"x")
        assert received(client) == (b"x", "")
        other.close()
        data, error = received(client)
        assert (data, bool(error)) == (b"", True)


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
