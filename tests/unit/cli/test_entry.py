"""The console script as a process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moebus.observability.metrics import moebus_version

COMMAND = [sys.executable, "-m", "moebus.cli"]


def test_version_as_json() -> None:
    done = subprocess.run([*COMMAND, "version", "--json"], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["moebus"] == moebus_version()


def test_an_output_that_cannot_be_written_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "version", "--json"], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "moebus: cannot write the output (No space left on device)\n"


def test_wrong_use_ends_with_2() -> None:
    done = subprocess.run([*COMMAND, "controll"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("package", "arguments", "extras"),
    [
        ("typer", ["version"], "cli"),
        ("lmdb", ["store"], "cli,store"),
        ("fastapi", ["gateway"], "cli,gateway"),
    ],
)
def test_a_package_that_is_not_installed(package: str, arguments: list[str], extras: str) -> None:
    hidden = f"import sys; sys.modules[{package!r}] = None; from moebus.cli.entry import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", hidden, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == f"moebus: this command needs the package {package}: pip install 'moebus[{extras}]'\n"
