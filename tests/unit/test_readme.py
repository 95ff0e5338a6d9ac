"""What the README's snippets import exists, and what its commands name is a command."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

from moebus.cli.main import app

README = (Path(__file__).parents[2] / "README.md").read_text()
IMPORTS = [
    (node.module, name.name)
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for node in ast.walk(ast.parse(block))
    if isinstance(node, ast.ImportFrom) and node.module
    for name in node.names
]
COMMANDS = re.findall(r"^\$ moebus (.+?) *(?:&? *#.*|&)?$", README, re.MULTILINE)


def test_there_are_snippets_and_commands() -> None:
    assert len(IMPORTS) >= 4
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_every_name_of_a_snippet_can_be_imported(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_and_option_exists(line: str) -> None:
    command, words = get_command(app), line.split()
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, line
        command = command.commands[words.pop(0)]
    options = {option for param in command.params for option in param.opts}
    assert {word for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("package", ["schemas", "producers", "consumers"])
def test_every_offered_name_loads(package: str) -> None:
    module = import_module(f"moebus.{package}")
    assert all(getattr(module, name) is not None for name in dir(module) if not name.startswith("_"))
