"""A gateway that starts before its topics are there."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from moebus.broker.local import LocalCluster
from tests.support.processes import launcher
from tests.support.wait import wait_until


@pytest.mark.kafka
def test_pages_are_there_and_commands_wait(kafka_broker: LocalCluster, topic_prefix: str, tmp_path: Path) -> None:
    with launcher(tmp_path, kafka_broker.bootstrap, topic_prefix) as processes:
        gateway = processes.start("gateway", "gateway")
        url = wait_until(lambda: gateway.text().partition('"url": "')[2].partition('"')[0], 60, "an address")
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
            assert http.get("/healthz").status_code == 200
            wait_until(lambda: "topics are missing" in http.get("/readyz").text, 60, "the reason")
            assert http.get("/openapi.json").status_code == 200
            for method, path in (("POST", "/v1/pause"), ("GET", "/v1/is_paused"), ("GET", "/v1/routes?run=r")):
                answer = http.request(method, path)
                assert (answer.status_code, answer.json()["status"]) == (503, "error"), path
            off = http.get("/clear_load_weight")
            assert (off.status_code, off.json()["msg"]) == (404, "Dynamic Load Weight Disabled.")
            assert http.post("/v1/sleep", params={"tags": "weights"}).status_code == 400
        assert gateway.terminate(30) == 0
