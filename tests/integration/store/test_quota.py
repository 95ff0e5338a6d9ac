"""A quota as users of a store see it: by HTTP, in its figures and metrics; each partition has its part."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from moebus.consumers.store import StoreOptions, store_routes
from moebus.observability.health import Health
from moebus.observability.http import HttpServer
from moebus.observability.settings import load_settings
from tests.support.routes import make_attempt
from tests.support.store import PARTITIONS, SMALL, Rig, held

ONE = len(make_attempt("r1", rows=40, codec="raw").records[0])
QUOTA = PARTITIONS * (4 * ONE + ONE // 2)


def test_the_oldest_rollouts_go_and_everybody_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path)
    options = replace(SMALL, quotas={"run": QUOTA})
    for number in range(1, 11):
        rig.put(make_attempt(f"r{number}", number=number, rows=40, codec="raw", group="g"))
        rig.put(make_attempt(f"r{number}", run="other", number=100 + number, rows=40, codec="raw", group="h"))
    with caplog.at_level(logging.WARNING), rig.running(options=options) as store:
        assert held(store) == ["r10", "r7", "r8", "r9"]
        assert len(store.page("other", None, b"", 100)) == 10
        assert rig.metrics.value("moebus_store_deleted_rollouts_total", cause="quota") == 6
        server = HttpServer(metrics=rig.metrics, health=Health(), routes=store_routes(lambda: store)).start()
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            gone = client.get("/v1/routes/run/r1")
            figures = client.get("/v1/store").json()["partitions"][str(rig.partition("g"))]
        server.stop()
    assert (gone.status_code, gone.json()["error"]) == (410, "RouteDeleted")
    assert "quota of run run" in gone.json()["detail"]
    mine = next(one for one in figures["runs"] if one["run"] == "run")
    assert mine["quota_bytes"] == QUOTA // PARTITIONS
    assert 3 * ONE < mine["used_bytes"] <= mine["quota_bytes"]
    assert sum("at its quota" in record.getMessage() for record in caplog.records) == 1  # not a line for each
    rig.folder = tmp_path / "rebuilt"
    with rig.running(options=options) as store:
        assert held(store) == ["r10", "r7", "r8", "r9"]


def test_settings_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBUS_STORE__QUOTAS", '{"run": 10, "*": 2}')
    rules = StoreOptions.of(load_settings().store).rules_for(4)
    assert (rules.quota("run"), rules.quota("any")) == (2, 1)
    assert StoreOptions().rules_for(4).quota("run") is None
