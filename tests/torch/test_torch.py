"""The checks of `checks.py`, run once in torch's environment; one test each."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.support.torch_env import run_torch

CHECKS = [
    node.name
    for node in ast.parse((Path(__file__).parent / "checks.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def report() -> dict[str, str]:
    found: dict[str, str] = json.loads(run_torch("-m", "tests.torch.checks"))
    return found


def test_there_are_checks(report: dict[str, str]) -> None:
    assert len(CHECKS) >= 8
    assert set(report) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_it_holds(report: dict[str, str], name: str) -> None:
    assert report[name] == "ok"
