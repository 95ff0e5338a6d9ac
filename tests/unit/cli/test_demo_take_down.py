"""`moebus demo --down` has ended what it names once it returns."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moebus.cli.demo import stage

STUBBORN = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
WILLING = "import signal, sys; print('up', flush=True); signal.pause()"


@pytest.mark.parametrize(("program", "by"), [(WILLING, signal.SIGTERM), (STUBBORN, signal.SIGKILL)])
def test_what_is_named_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, by: signal.Signals
) -> None:
    monkeypatch.setattr(stage, "_GRACE_SECONDS", 0.3 if by is signal.SIGKILL else 30.0)
    with subprocess.Popen([sys.executable, "-c", program, "moebus.cli"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (tmp_path / "demo.json").write_text(json.dumps({"pids": {"worker-1": process.pid, "gone": 2**22 + 1}}))
        assert stage.take_down(tmp_path) == ["worker-1"]
        assert process.wait(5) == -by
    assert not (tmp_path / "demo.json").exists()
    assert stage.take_down(tmp_path) == []
