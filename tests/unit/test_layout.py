"""The architecture of design section 1 as tests: import order, no cycles, small files, complete package list."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
ORDER = ("schemas", "observability", "broker", "engine", "producers", "consumers", "cli")
FORBIDDEN = {
    "schemas": {"kafka", "paddle", "prometheus_client", "lmdb", "httpx", "starlette", "pydantic_settings"},
    "observability": {"kafka", "paddle", "lmdb"},
    "engine": {"kafka", "lmdb"},
    "producers": {"kafka", "paddle", "lmdb"},
    "consumers": {"kafka", "paddle"},
    "cli": {"paddle", "lmdb"},
}


def _files(package: str) -> Iterator[Path]:
    return (path for path in sorted((ROOT / package).rglob("*.py")))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("moebus", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _imports(path: Path, *, lazy: bool) -> Iterator[str]:
    """Modules that `path` imports; `lazy=False` leaves out imports inside functions and under TYPE_CHECKING."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if not lazy and (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _type_checking(node)):
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            # `from package import module` needs the package's own names only if one of them is asked for.
            if not all(_is_module(name) for name in names):
                yield node.module or ""
            yield from names


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split(".")[1:])
    return name.startswith("moebus.") and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("package", ORDER)
def test_imports_only_from_folders_above(package: str) -> None:
    below = {f"moebus.{name}" for name in ORDER[ORDER.index(package) + 1 :]}
    for path in _files(package):
        for name in _imports(path, lazy=True):
            assert ".".join(name.split(".")[:2]) not in below, f"{path} imports {name}"


@pytest.mark.parametrize(("package", "banned"), FORBIDDEN.items())
def test_third_party_imports(package: str, banned: set[str]) -> None:
    for path in _files(package):
        if package == "engine" and "paddle" in path.parts:
            continue
        if package == "consumers" and "store" in path.parts:
            banned = banned - {"lmdb"}
        for name in _imports(path, lazy=package != "cli"):
            assert name.split(".")[0] not in banned, f"{path} imports {name}"


def test_only_broker_imports_kafka() -> None:
    users = {
        p.relative_to(ROOT).parts[0]
        for pkg in ORDER
        for p in _files(pkg)
        for n in _imports(p, lazy=False)
        if n.split(".")[0] == "kafka"
    }
    assert users == {"broker"}


def test_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    modules = {_module(path): path for package in ORDER for path in _files(package)}
    for name, path in modules.items():
        graph[name] = {found for found in _imports(path, lazy=False) if found in modules and found != name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name in done:
            return
        for target in sorted(graph[name]):
            visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())
    assert len(done) > 20


def test_files_are_small() -> None:
    for folder in (*ORDER, "tests", "bench", "examples"):
        for path in _files(folder):
            assert len(path.read_text().splitlines()) <= 400, path


def test_package_list_is_complete() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = set(config["packages"])
    found = {_module(path) for package in ORDER for path in _files(package) if path.name == "__init__.py"}
    assert listed == found
    assert not (ROOT / "moebus").exists(), "a folder called moebus would shadow the namespace"
    assert all((ROOT / package / "py.typed").exists() for package in ORDER)


@pytest.mark.parametrize("module", ["moebus.producers", "moebus.consumers.reader", "moebus.schemas"])
def test_import_needs_no_paddle_and_no_store(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('paddle', 'lmdb', 'uvicorn', 'typer')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
