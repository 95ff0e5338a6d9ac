"""No code from the wire: nothing in the package can be made to run what somebody sends (R23)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("schemas", "observability", "broker", "engine", "producers", "consumers", "cli")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.func.id
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield "allow_pickle"


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_runs_what_was_sent(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {fault}"
        for path in (ROOT / folder).rglob("*.py")
        for fault in faults(ast.parse(path.read_text()))
    }
    assert found == set()


def test_the_search_finds_what_it_looks_for() -> None:
    code = "import pickle\nfrom dill import loads\neval('1')\nload(f, allow_pickle=True)\nload(f, allow_pickle=False)"
    assert sorted(faults(ast.parse(code))) == ["allow_pickle", "dill", "eval", "pickle"]
