"""The import of Paddle: version, absence, and no trace left in the process."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

from moebus.engine.paddle import runtime
from moebus.engine.paddle.runtime import PaddleUnavailable, check_version, load_paddle
from tests.support.paddle import needs_paddle

_PROBE = """
import json, logging, os, signal, sys, warnings
warnings.simplefilter("error")
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append("term"))
signal.signal(signal.SIGABRT, signal.SIG_IGN)
import moebus.engine.paddle
lazy = "paddle" not in sys.modules
paddle = moebus.engine.paddle.load_paddle()
paddle.ones([2]).sum()
os.kill(os.getpid(), signal.SIGTERM)
print(json.dumps({
    "lazy": lazy, "omp": os.environ.get("OMP_NUM_THREADS"), "handlers": len(logging.getLogger().handlers),
    "seen": seen, "ignored": signal.getsignal(signal.SIGABRT) is signal.SIG_IGN,
    "same": moebus.engine.paddle.load_paddle() is paddle,
}))
"""


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("threads", [None, "1"])
def test_the_import_leaves_no_trace(threads: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {} if threads is None else {"OMP_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "lazy": True, "omp": threads, "handlers": 0, "seen": ["term"], "ignored": True, "same": True,
    }  # fmt: skip
    assert "ccache" not in done.stderr


@pytest.mark.parametrize("version", ["3.0.0", "3.3.1", "4.0.0rc1", "0.0.0", "0.0.0.post118"])
def test_good_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.6.2", "1.8.5", "", "dev"])
def test_old_versions_are_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(PaddleUnavailable, match=r"3\.0 or later is needed: install"):
        check_version(version)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModuleNotFoundError("x", name="paddle"), "needs PaddlePaddle: install"),
        (ModuleNotFoundError("x", name="setuptools"), "'setuptools' is missing"),
        (ImportError("libcuda.so.1"), r"does not import \(libcuda"),
    ],
)
def test_an_absent_or_broken_paddle_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(runtime, "_loaded", [])
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(PaddleUnavailable, match=text) as caught:
        load_paddle()
    assert "\n" not in str(caught.value)
