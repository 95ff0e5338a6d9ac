"""The page at `/openapi.json`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import SecretStr

from moebus.producers.gateway import Backend, gateway_app
from moebus.producers.gateway.routes import Npy
from tests.support.asgi import ask
from tests.support.openapi import Described

PATHS = {
    ("POST", "/v1/pause"), ("POST", "/v1/resume"), ("POST", "/v1/sleep"), ("POST", "/v1/wakeup"),
    ("POST", "/v1/update_weights"), ("POST", "/v1/abort_requests"), ("GET", "/v1/is_paused"),
    ("GET", "/clear_load_weight"), ("GET", "/update_model_weight"),
    ("GET", "/v1/workers"), ("GET", "/v1/workers/{worker_id}"),
    ("POST", "/v1/control"), ("GET", "/v1/control"), ("GET", "/v1/control/{request_id}"),
}  # fmt: skip
ROUTES = {
    ("GET", "/v1/routes/{run}/{rollout_id}"), ("GET", "/v1/rollout"), ("GET", "/v1/routes"), ("DELETE", "/v1/routes"),
}  # fmt: skip


class NoStores:
    def rollout(self, run: str, rollout_id: str, choice: int, attempt: str | None) -> Npy:
        raise AssertionError

    def listing(self, run: str, prefix: str | None, limit: int, after: str | None) -> dict[str, Any]:
        raise AssertionError

    def delete(self, run: str, prefix: str, epoch: int) -> dict[str, Any]:
        raise AssertionError


@pytest.fixture(scope="module")
def page() -> Described:
    app = gateway_app(Backend(lambda: None), token=SecretStr("a long secret"), route_backend=NoStores())
    answer = ask(app, "GET", "/openapi.json")
    assert answer.status_code == 200
    return Described(answer.json())


def test_every_path_is_there_and_no_other(page: Described) -> None:
    assert set(page.operations()) == PATHS | ROUTES
    assert re.fullmatch(r"3\.1\.\d+", page.document["openapi"])
    assert page.document["info"]["title"]
    assert page.document["info"]["version"]


def test_routes_are_left_out_where_nobody_is_asked_for_them() -> None:
    app = gateway_app(Backend(lambda: None))
    assert set(Described(ask(app, "GET", "/openapi.json").json()).operations()) == PATHS
    assert ask(app, "GET", "/v1/routes").status_code == 404


def test_every_operation_is_described(page: Described) -> None:
    operations = page.operations()
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(set(ids)) == len(ids)
    for (method, path), operation in operations.items():
        assert operation["description"], path
        assert {"400", "401", "403", "503", "default"} <= set(operation["responses"]), path
        assert "422" not in operation["responses"] or path.startswith(("/v1/routes", "/v1/rollout")), path
        assert operation["security"] == [{"HTTPBearer": []}], path
        named = set(re.findall(r"\{(\w+)\}", path))
        given = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
        assert named == given, path
        assert ("requestBody" in operation) == ((method, path) in WITH_BODY), path
    assert page.document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"


WITH_BODY = {("POST", "/v1/update_weights"), ("POST", "/v1/abort_requests"), ("POST", "/v1/control")}


def test_schemas_are_schemas_and_references_lead_somewhere(page: Described) -> None:
    schemas = page.document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    found = set(_references(page.document))
    assert found
    assert found <= {f"#/components/schemas/{name}" for name in schemas}


def test_bodies_refuse_what_they_do_not_know(page: Described) -> None:
    for method, path in WITH_BODY:
        body = page.operations()[method, path]["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].rpartition("/")[2]
        assert page.document["components"]["schemas"][name]["additionalProperties"] is False


def _references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def test_the_docs_name_the_same_paths() -> None:
    text = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    rows = re.findall(r"^\| `(/[^`]*)` \| (GET|POST|DELETE) \|", text, re.M)
    assert {(method, path) for path, method in rows} == PATHS | ROUTES
    assert len(rows) == len(PATHS | ROUTES)
