#!/bin/sh
# Fuzzes each decoder for SECONDS with atheris, which is installed under .run/fuzz and not beside the project.
# What it finds is left there as crash-*; make it a test before it is mended.
set -eu
cd "$(dirname "$0")/../.."
seconds=${1:-60}
python=.venv/bin/python
if ! $python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
  echo "atheris is built for Python 3.11 and .venv is another: skipped"
  exit 0
fi
mkdir -p .run/fuzz
[ -d .run/fuzz/lib/atheris ] || $python -m pip install -q --disable-pip-version-check --no-deps --target .run/fuzz/lib atheris==3.0.0
for name in record journal control; do
  echo "== $name, $seconds s"
  PYTHONPATH=.run/fuzz/lib $python tests/fuzz/run.py $name .run/fuzz/$name -max_total_time="$seconds" -max_len=20000 \
    -rss_limit_mb=2048 -timeout=10 -artifact_prefix=.run/fuzz/$name- -print_final_stats=1 >".run/fuzz/$name.log" 2>&1 ||
    { tail -n 40 ".run/fuzz/$name.log"; exit 1; }
  grep -E 'stat::(number_of_executed_units|average_exec_per_sec|peak_rss_mb)' ".run/fuzz/$name.log"
done
