"""Holding answers against the schema that the gateway publishes."""

from __future__ import annotations

import re
from typing import Any

import httpx
from jsonschema import Draft202012Validator


class Described:
    """An OpenAPI 3.1 document, as JSON."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._paths = [(_pattern(path), operations) for path, operations in document["paths"].items()]

    def operations(self) -> dict[tuple[str, str], dict[str, Any]]:
        """(method, path) -> the operation."""
        return {
            (method.upper(), path): operation
            for path, operations in self.document["paths"].items()
            for method, operation in operations.items()
        }

    def schema(self, method: str, path: str, status: int) -> dict[str, Any] | None:
        """Of the JSON body; None where the answer is described as something else. KeyError: not described at all."""
        for pattern, operations in self._paths:
            if pattern.fullmatch(path) and method.lower() in operations:
                responses = operations[method.lower()]["responses"]
                answer = responses.get(str(status)) or responses["default"]
                body = answer["content"].get("application/json")
                return None if body is None else {**body["schema"], "components": self.document["components"]}
        raise KeyError(f"{method} {path}")

    def check(self, response: httpx.Response) -> None:
        """An event hook: AssertionError where the answer is not as described."""
        response.read()
        request = response.request
        path = request.url.raw_path.decode().partition("?")[0]
        schema = self.schema(request.method, path, response.status_code)
        if schema is None:
            return
        errors = [error.message for error in Draft202012Validator(schema).iter_errors(response.json())]
        assert not errors, f"{request.method} {path} {response.status_code}: {errors}"


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[^}]*\})", path)
    return re.compile("".join(".+" if part.startswith("{") else re.escape(part) for part in parts))
