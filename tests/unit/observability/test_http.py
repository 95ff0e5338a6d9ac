from __future__ import annotations

import io
import json
import logging
import socket

import httpx
import pytest

from moebus.observability.health import Health
from moebus.observability.http import HttpServer, _bind
from moebus.observability.log import configure_logging, get_logger
from moebus.observability.metrics import Metrics
from moebus.schemas.errors import SettingsError


def test_pages_of_a_process() -> None:
    health = Health()
    metrics = Metrics()
    state: list[str] = ["waiting for a broker"]
    health.add_ready("broker", lambda: state[0] if state else None)
    server = HttpServer(metrics=metrics, health=health).start()
    try:
        assert server.url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        red = httpx.get(f"{server.url}/readyz")
        assert (red.status_code, red.json()["failed"]) == (503, {"broker": "waiting for a broker"})
        state.clear()
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert "moebus_build_info{" in httpx.get(f"{server.url}/metrics").text
        assert httpx.get(f"{server.url}/nothing").status_code == 404
    finally:
        server.stop()
        server.stop()


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")]
)
def test_the_url_of_a_page(host: str, shown: str) -> None:
    server = HttpServer(metrics=Metrics(), health=Health(), host=host)
    assert server.url == f"http://{shown}:{server.port}"
    server.stop()


def test_a_check_that_breaks_is_a_failed_check() -> None:
    health = Health()
    health.add_live("loop", lambda: str(1 // 0))
    assert "division" in health.live()["loop"]


def test_a_port_in_use_is_one_sentence() -> None:
    server = HttpServer(metrics=Metrics(), health=Health()).start()
    try:
        with pytest.raises(SettingsError, match="--http-port"):
            HttpServer(metrics=Metrics(), health=Health(), port=server.port)
    finally:
        server.stop()


def test_json_lines_carry_action_and_ids() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("moebus")
    before = (logger.handlers[:], logger.level, logger.propagate)
    try:
        configure_logging("INFO", "json", stream)
        log = get_logger("moebus.test").bind(request_id="r-1")
        log.info("control.applied", "paused", worker_id="w-1", position="t/0/3")
        log.debug("hidden")
        try:
            raise ValueError("cause")
        except ValueError as exc:
            log.error("control.failed", "not paused", exc=exc)
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["action"] for line in lines] == ["control.applied", "control.failed"]
    assert {line["request_id"] for line in lines} == {"r-1"}
    assert "ValueError: cause" in lines[1]["error"]


def test_small_answers_are_sent_at_once() -> None:
    """Connections must not hold back the second piece of an answer until the first is acknowledged."""
    with _bind("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
