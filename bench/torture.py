"""Ordering torture: 20 minutes of random traffic over 8 partitions in 2 minutes, on three stores that come and go.

    python bench/torture.py [--seeds 1,2,3] [--seconds 120] [--minutes 20]

Every store ends equal to a model that is too simple to be wrong; whoever read in between saw only whole, right
rollouts. Odd seeds have a quota for the run. Exit code 1, with the seed, where anything differs. `make soak` runs it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.torture import Plan, Torture

QUOTA = 5_000
SHOWN = ("records", "joined", "left", "outages", "get", "resolve", "listed", "streamed", "acks", "whole at the end",
         "ended by quota")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=120.0, help="real time of each seed")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the broker's time")
    args = parser.parse_args()
    logging.disable(logging.ERROR)  # outages and restarts are what this is about
    failed = False
    for seed in map(int, args.seeds.split(",")):
        plan = Plan(seed, args.seconds, args.minutes, quota=QUOTA if seed % 2 else None)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            torture = Torture(plan, Path(folder))
            try:
                torture.run()
                verdict = "every store equals the model"
            except AssertionError as error:
                failed, verdict = True, f"FAILED: {error}"
        counts = torture.report.counts
        errors = {name: count for name, count in sorted(counts.items()) if name not in SHOWN}
        print(f"seed {seed}: {verdict} ({time.monotonic() - began:.0f} s, quota {plan.quota})", flush=True)
        print("  " + ", ".join(f"{name} {counts[name]:,}" for name in SHOWN))
        print(f"  traffic {torture._traffic.counts}; refused {errors}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
