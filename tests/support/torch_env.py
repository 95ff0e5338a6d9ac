"""The environment with torch (`make torch`): programs that need it run there, in processes of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-torch" / "bin" / "python"


def need_torch() -> None:
    """Skips the test where torch was left out; under CI it fails unless that was asked for."""
    if os.environ.get("TORCH") == "0":
        pytest.skip("TORCH=0: the tests of torch are left out")
    if not PYTHON.exists():
        if os.environ.get("CI"):
            raise AssertionError(".venv-torch is missing: run `make torch`, or leave it out with TORCH=0")
        pytest.skip("no .venv-torch: run `make torch`")


def run_torch(*arguments: str, env: Mapping[str, str] | None = None, timeout: float = 90.0) -> str:
    """The stdout of a program under torch's Python; AssertionError with its stderr if it fails."""
    need_torch()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MOEBUS_")}
    done = subprocess.run(
        [str(PYTHON), *arguments], capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT,
        env={**clean, **(env or {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
