"""The prefill / decode split between two real processes: the results of one engine, also after one of them dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine
from tests.support.paddle import SMALL, needs_paddle
from tests.support.split_program import PROMPTS, SEED, TIMEOUT

PROGRAM = [sys.executable, "-m", "tests.support.split_program"]
ROOT = Path(__file__).parents[2]


@needs_paddle
@pytest.mark.paddle
def test_two_processes_give_what_one_engine_gives(tmp_path: Path) -> None:
    decoder = subprocess.Popen(
        [*PROGRAM, "decode", str(tmp_path), str(len(PROMPTS))], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert decoder.stdout is not None
        port = decoder.stdout.readline().removeprefix("port ").strip()
        died = subprocess.run([*PROGRAM, "prefill", port, "cut"], cwd=ROOT, timeout=TIMEOUT, check=False)
        assert died.returncode == -9
        assert decoder.stdout.readline().startswith("refused handover: cut off")
        subprocess.run([*PROGRAM, "prefill", port], cwd=ROOT, timeout=TIMEOUT, check=True)
        assert decoder.wait(TIMEOUT) == 0
    finally:
        decoder.kill()
        decoder.communicate()
    engine = PaddleEngine.create(SMALL, seed=SEED)
    try:
        for prompt in PROMPTS:
            expected = engine.generate(prompt, TIMEOUT)
            with np.load(tmp_path / f"{prompt.request_id}.npz") as found:  # no pickle: numbers and text
                assert found["tokens"].tolist() == expected.token_ids.tolist()
                assert np.array_equal(found["routes"], expected.routes)  # type: ignore[arg-type]
                assert np.abs(found["logprobs"] - expected.logprobs).max() < 2e-5
                assert found["text"].tolist() == [expected.finish_reason, "0 initial"]
                assert found["cached"].tolist() == [expected.cached_tokens]
    finally:
        engine.close()
