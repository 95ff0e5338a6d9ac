"""The programs of `examples/`, as a user runs them: real Kafka, real workers and stores, processes of their own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.broker.local import LocalCluster
from moebus.consumers import MegatronShard, RoutingReader
from moebus.engine.simulated.oracle import expected_routes
from moebus.observability.settings import KafkaSettings, Settings
from moebus.schemas.route_ref import RouteRef
from tests.support.processes import Launcher, launcher
from tests.support.torch_env import need_torch, run_torch
from tests.support.vllm_completions import CONFIG, HF_CONFIG, VERSION, Completions

EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT = 30.0
AGENTS, TURNS, NEW = 3, 3, 8
ROWS = 3 + TURNS * NEW + 2 * (TURNS - 1) - 1


@pytest.fixture(scope="module")
def fleet(kafka_broker: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A store and two workers."""
    folder = tmp_path_factory.mktemp("examples")
    with launcher(folder, kafka_broker.bootstrap, f"t-examples-{folder.name}") as opened:
        assert opened.run("topics", "ensure").returncode == 0
        opened.store()
        opened.worker("w1")
        opened.worker("w2")
        yield opened


def environment(fleet: Launcher) -> dict[str, str]:
    return {
        "MOEBUS_KAFKA__BOOTSTRAP_SERVERS": fleet.bootstrap,
        "MOEBUS_TOPIC_PREFIX": fleet.prefix,
        "MOEBUS_RUN": "exp-7",
    }


def run_example(fleet: Launcher, name: str, *arguments: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MOEBUS_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=90, check=False,
        env={**clean, **environment(fleet)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def samples(fleet: Launcher) -> list[dict[str, Any]]:
    """What the agent loop hands on; it is in `samples.jsonl` too."""
    server = Completions()
    try:
        config = fleet.directory / "config.json"
        config.write_text(json.dumps(HF_CONFIG))
        arguments = ["--url", server.url, "--model-config", str(config), "--agents", str(AGENTS)]
        printed = run_example(fleet, "agent_loop.py", *arguments)
    finally:
        server.close()
    first = [0] * AGENTS
    assert sorted(server.starts) == sorted([*first, *[3 + NEW - 1] * AGENTS, *[3 + 2 * NEW + 2 - 1] * AGENTS])
    (fleet.directory / "samples.jsonl").write_text(printed)
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.kafka
def test_the_agent_loop_hands_on_refs_that_resolve(fleet: Launcher, samples: list[dict[str, Any]]) -> None:
    refs = [RouteRef.parse(sample["routes"]) for sample in samples]
    assert [ref.rollout_id for ref in refs] == [f"task-{number}:0:{TURNS - 1}:0" for number in range(AGENTS)]
    assert {ref.rows for ref in refs} == {ROWS}
    tokens = [sample["tokens"] for sample in samples]
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=fleet.bootstrap), topic_prefix=fleet.prefix, run="exp-7")
    with RoutingReader.from_settings(settings=settings) as reader:
        batch = reader.resolve(refs, tokens, wait=WAIT)
        for index, sequence in enumerate(tokens):
            rows = batch.routes[int(batch.cu_seqlens[index]) :][:ROWS]
            assert np.array_equal(rows, expected_routes(CONFIG, VERSION, sequence)[:-1])
        assert batch.layers == CONFIG.moe_layers


@pytest.fixture(scope="module")
def in_torch(fleet: Launcher, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the two programs in torch print; one process runs both, as importing torch takes seconds."""
    need_torch()
    assert len(samples) == AGENTS
    file = str(fleet.directory / "samples.jsonl")
    calls = [
        [str(EXAMPLES / "train_step.py"), file],
        [str(EXAMPLES / "megatron_replay.py"), file, "--cp-rank", "1", "--cp-size", "2", "--layers", "2", "3"],
    ]
    code = (
        "import json, runpy, sys\nfor sys.argv in json.loads(sys.argv[1]): runpy.run_path(sys.argv[0], {}, '__main__')"
    )
    printed = run_torch("-c", code, json.dumps(calls), env=environment(fleet))
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.kafka
def test_a_trainer_step_in_torch_replays_the_batch(
    samples: list[dict[str, Any]], in_torch: list[dict[str, Any]]
) -> None:
    report = in_torch[0]
    sampled = sum(sum(sample["mask"]) for sample in samples)
    assert (report["trained"], report["replayed"]) == (sampled, sampled)  # every row that sampled a token was replayed
    assert sampled == AGENTS * TURNS * NEW
    assert len(report["gradients"]) == 3
    assert min(report["gradients"]) > 1e-6  # they reach every router
    assert 0 < report["loss"] < 20


@pytest.mark.kafka
def test_megatron_s_form_of_a_replay(samples: list[dict[str, Any]], in_torch: list[dict[str, Any]]) -> None:
    report = in_torch[1]
    lengths = [len(sample["tokens"]) for sample in samples]
    rows = MegatronShard(cp_rank=1, cp_size=2).rows(lengths)
    whole = np.concatenate([expected_routes(CONFIG, VERSION, sample["tokens"]) for sample in samples])
    recorded = [row for row in rows.tolist() if row >= 0 and (row + 1) not in np.cumsum(lengths)]
    assert report["layers"] == [2, 3]
    assert report["shapes"] == [[len(rows), CONFIG.top_k]] * 2
    assert report["dtype"] == "torch.int64"
    assert report["recorded"] == len(recorded)
    assert report["sums"] == [int(whole[recorded, place].sum()) for place in (1, 2)]


@pytest.mark.kafka
def test_the_colocated_loop(fleet: Launcher) -> None:
    printed = run_example(fleet, "colocated_loop.py", str(fleet.directory), "--steps", "2")
    assert printed.splitlines() == [
        f"step-{number} {{'w1': 'RUNNING step-{number}', 'w2': 'RUNNING step-{number}'}}" for number in (1, 2)
    ]
    shown = json.loads(fleet.run("workers", "--json").stdout.splitlines()[0])
    assert shown["state"]["version"] == "step-2"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_examples_are_short(name: str) -> None:
    """Under 40 lines of their own: without imports, docstrings, comments and blank lines."""
    source = (EXAMPLES / name).read_text()
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom)) and not _docstring(node):
            lines |= set(range(node.lineno, node.lineno + 1)) if hasattr(node, "body") else _span(node)
    assert len(lines) < 40, sorted(lines)


def _docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def test_the_page_of_the_examples_names_each() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"`{path.name}`" in page
