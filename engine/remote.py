"""Weight sources behind a URL, read through fsspec into a temporary folder."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from moebus.engine.port import Deadline, EngineRefused
from moebus.engine.waiting import check_deadline
from moebus.schemas.errors import MoebusError

MAX_FILES = 10_000
_CHUNK = 8 << 20
_MANY_ROADS = ("::", "%", "?", "#", "\\", "\0", "*", "[")  # more than one spelling of one place


def is_remote(text: str) -> bool:
    """Whether `text` is a URL of something other than local files."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.lower() not in ("file", "local")


def check_url(source: str, roots: Sequence[str]) -> str:
    """`source` with its scheme in lower case and no slash at its end.

    Raises:
        EngineRefused: it could be read in more than one way, names a user, or lies under none of `roots`.
    """
    scheme, _, rest = source.partition("://")
    rest = rest.rstrip("/")
    host, *segments = rest.split("/")
    if "@" in host:
        raise EngineRefused(f"source: a URL of {host.rpartition('@')[2]!r} names a user; give credentials to fsspec")
    if any(mark in source for mark in _MANY_ROADS) or any(part in ("", ".", "..") for part in segments) or not rest:
        raise EngineRefused(f"source: {source!r} is not a plain URL; leave out escapes, patterns, `..` and queries")
    url = f"{scheme.lower()}://{rest}"
    for root in roots:
        start, _, place = root.partition("://")
        allowed = f"{start.lower()}://{place.rstrip('/')}"
        if url == allowed or url.startswith(f"{allowed.rstrip('/')}/"):
            return url
    named = ", ".join(roots) or "none"
    raise EngineRefused(f"source: {source!r} lies outside the allowed weight roots ({named})")


@contextmanager
def fetched(url: str, pattern: str, deadline: Deadline) -> Iterator[Path]:
    """A local copy of the file `url`, or of the files of directory `url` whose names match `pattern`; gone at the end.

    Raises:
        EngineRefused: fsspec or its helper for the scheme is missing, nothing is there, it cannot be read, or it is
            larger than what is free.
        EngineTimeout
    """
    with tempfile.TemporaryDirectory(prefix="moebus-weights-") as folder:
        try:
            path = _Copy(url, Path(folder), deadline).make(pattern)
        except MoebusError:
            raise
        except ImportError as error:
            raise EngineRefused(f"source: {url!r} needs a package that is not installed ({error})") from error
        except Exception as error:  # each file system of fsspec has errors of its own
            raise EngineRefused(f"source: {url!r} cannot be read ({type(error).__name__}: {error})") from error
        yield path


class _Copy:
    """One download; `make` gives the path of what was copied."""

    def __init__(self, url: str, folder: Path, deadline: Deadline) -> None:
        self._url = url
        self._folder = folder
        self._deadline = deadline
        self._left = shutil.disk_usage(folder).free
        self._files, self._path = _fsspec().url_to_fs(url)

    def make(self, pattern: str) -> Path:
        info = self._files.info(self._path)
        if info["type"] != "directory":
            return self._file(self._path, info)
        there = [entry for entry in self._files.ls(self._path, detail=True) if entry["type"] == "file"]
        wanted = {_name(entry): entry for entry in there if fnmatch(_name(entry), pattern)}
        if len(wanted) > MAX_FILES:
            raise EngineRefused(f"source: {self._url!r} holds {len(wanted)} files; {MAX_FILES} are read at most")
        for name in sorted(wanted):
            self._file(wanted[name]["name"], wanted[name])
        return self._folder

    def _file(self, remote: str, info: dict[str, Any]) -> Path:
        if (info.get("size") or 0) > self._left:
            raise self._too_large()
        target = self._folder / _name({"name": remote})
        with self._files.open(remote, "rb") as stream, target.open("xb") as out:
            while chunk := stream.read(_CHUNK):
                check_deadline(self._deadline, f"reading {self._url}")
                self._left -= len(chunk)
                if self._left < 0:
                    raise self._too_large()
                out.write(chunk)
        return target

    def _too_large(self) -> EngineRefused:
        return EngineRefused(f"source: {self._url!r} is larger than what is free in {self._folder.parent}")


def _name(entry: dict[str, Any]) -> str:
    return PurePosixPath(str(entry["name"])).name


def _fsspec() -> Any:
    try:
        return importlib.import_module("fsspec.core")
    except ModuleNotFoundError as error:
        raise EngineRefused(
            "source: URLs are read through fsspec, which is not installed; `pip install 'moebus[fsspec]'`"
        ) from error
