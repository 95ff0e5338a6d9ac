"""A remote file system of this process, for weight sources behind a URL."""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from pathlib import Path

import pytest

ROOT = "memory://moebus-tests"
needs_fsspec = pytest.mark.skipif(importlib.util.find_spec("fsspec") is None, reason="fsspec is not installed")


def upload(path: Path) -> str:
    """Copies a file, or the files of a directory, to a new folder below ROOT; returns its URL."""
    files = importlib.import_module("fsspec").filesystem("memory")
    folder = f"{ROOT}/{uuid.uuid4().hex}"
    if path.is_dir():
        for file in path.iterdir():
            files.pipe(f"{folder}/{path.name}/{file.name}", file.read_bytes())
    else:
        files.pipe(f"{folder}/{path.name}", path.read_bytes())
    return f"{folder}/{path.name}"


def remove(url: str) -> None:
    """Deletes what `url` names."""
    importlib.import_module("fsspec").filesystem("memory").rm(url, recursive=True)
