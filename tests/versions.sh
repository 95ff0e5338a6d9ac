#!/bin/sh
# Runs the unit tests on each Python version given (`3.10 3.13`), in .venv-VERSION; skips, aloud, what is not installed.
set -eu
cd "$(dirname "$0")/.."
for version in "$@"; do
  python=$(command -v "python$version" || true)
  "${python:-false}" -c '' 2>/dev/null || python=$(ls "$HOME"/.pyenv/versions/"$version".*/bin/python3 2>/dev/null | head -n 1)
  if [ -z "$python" ]; then
    echo "Python $version is not installed: skipped"
    continue
  fi
  echo "== Python $version: $python"
  [ -x ".venv-$version/bin/python" ] || "$python" -m venv ".venv-$version"
  ".venv-$version/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
  ".venv-$version/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
  ".venv-$version/bin/python" -m pytest -q tests/unit
done
