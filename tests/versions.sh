#!/bin/sh
# Runs the unit tests on each Python version given (`3.10 3.13`), in .venv-VERSION; skips, aloud, what is not installed.
# On the first of them also those of records, routes and stores with NumPy 1.26, the oldest that is supported.
set -eu
cd "$(dirname "$0")/.."
numpy=1.26.4
for version in "$@"; do
  python=$(command -v "python$version" || true)
  "${python:-false}" -c '' 2>/dev/null || python=$(ls "$HOME"/.pyenv/versions/"$version".*/bin/python3 2>/dev/null | head -n 1)
  if [ -z "$python" ]; then
    echo "Python $version is not installed: skipped"
    continue
  fi
  echo "== Python $version: $python"
  venv=".venv-$version"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
  [ -n "${ONLY_NUMPY:-}" ] || "$venv/bin/python" -m pytest -q tests/unit
  if [ -n "$numpy" ]; then
    echo "== Python $version, NumPy $numpy"
    # A folder before the environment's own packages: the environment itself stays as the lock says.
    [ -d "$venv/numpy-$numpy/numpy" ] ||
      "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --target "$venv/numpy-$numpy" "numpy==$numpy"
    PYTHONPATH="$venv/numpy-$numpy" "$venv/bin/python" -c "import numpy; assert numpy.__version__ == '$numpy', numpy.__version__"
    PYTHONPATH="$venv/numpy-$numpy" "$venv/bin/python" -m pytest -q tests/unit/records tests/unit/routes tests/unit/store tests/unit/schemas
    numpy=
  fi
done
