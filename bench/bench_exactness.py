"""Gathered routes against a full recompute, 50,000 token-layers and more in every case; the peer is the recompute.

0 mismatches are asked for: anything else ends the run with an error. Usage: `python bench/bench_exactness.py [minimum]`
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.exact_cases import CASES


def main() -> int:
    least = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    failed = 0
    print(f"{'case':18} {'token-layers':>12} {'mechanism':>10} {'mismatches':>11} {'seconds':>8}")
    for name, case in CASES.items():
        begun = time.perf_counter()
        compared = seen = 0
        first = 0
        try:
            while compared < least:
                report = case(first)
                compared, seen, first = compared + report.compared, seen + report.seen, first + 1
        except AssertionError as error:
            failed += 1
            print(f"{name:18} {compared:12} {seen:10} {'some':>11}   {str(error).splitlines()[0]}")
            continue
        print(f"{name:18} {compared:12} {seen:10} {0:11} {time.perf_counter() - begun:8.1f}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
