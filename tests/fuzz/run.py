"""Runs one target under atheris: `python tests/fuzz/run.py record CORPUS -max_total_time=60`. See fuzz.sh."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

atheris: Any = import_module("atheris")  # not among the project's dependencies
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

with atheris.instrument_imports(include=["moebus.schemas", "moebus.producers.routing.process"]):
    from tests.fuzz.targets import TARGETS, seeds


def main() -> None:
    name, corpus = sys.argv[1], Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(seeds(name)):
        (corpus / f"seed-{index}").write_bytes(seed)
    atheris.Setup([sys.argv[0], str(corpus), *sys.argv[3:]], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
