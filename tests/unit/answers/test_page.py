"""What the snippets of `docs/answers.md` import and call is there."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from moebus.producers import AsyncRoutingPublisher, RoutingPublisher

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs" / "answers.md").read_text(), re.DOTALL)
IMPORTS = [
    (node.module, name.name)
    for block in BLOCKS
    for node in ast.walk(ast.parse(block))
    if isinstance(node, ast.ImportFrom) and node.module
    for name in node.names
]


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_every_name_can_be_imported(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)


@pytest.mark.parametrize("engine", ["fastdeploy", "sglang", "vllm"])
def test_every_engine_has_both(engine: str) -> None:
    module = import_module(f"moebus.engine.{engine}")
    assert {"RouteStream", "decode_routes"} <= set(dir(module))
    parameters = inspect.signature(module.decode_routes).parameters
    assert list(parameters) == ["response", "card", "start", "prompt_token_ids", "layers"]


def test_every_keyword_is_an_argument() -> None:
    known = inspect.signature(RoutingPublisher.publish_response).parameters
    for block in BLOCKS:
        for node in ast.walk(ast.parse(block)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "publish_response"
            ):
                assert {keyword.arg for keyword in node.keywords} <= set(known)
    assert len(BLOCKS) == 2
    assert hasattr(AsyncRoutingPublisher, "publish_response")
