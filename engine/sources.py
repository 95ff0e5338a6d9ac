"""Weight sources: a path, a `file://` URL or a URL that fsspec reads, under one of the allowed roots."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from moebus.engine.port import Deadline, EngineRefused
from moebus.engine.remote import check_url, fetched, is_remote
from moebus.engine.waiting import Never


@contextmanager
def local_source(
    source: str,
    allowed_roots: Sequence[str | os.PathLike[str]],
    *,
    pattern: str = "*",
    deadline: Deadline | None = None,
) -> Iterator[Path]:
    """What `source` names, as a local file or directory: itself, or a copy of what a URL names that is gone at the end.

    `allowed_roots`: paths, or URLs that a source must begin with. `pattern`: of a remote directory's files to copy.

    Raises:
        EngineRefused: as `resolve_source`, `check_url` and `fetched`.  EngineTimeout.
    """
    roots = [os.fspath(root) for root in allowed_roots]
    if is_remote(source):
        url = check_url(source, [root for root in roots if is_remote(root)])
        with fetched(url, pattern, deadline or Never()) as path:
            yield path
    else:
        yield resolve_source(source, [root for root in roots if not is_remote(root)])


def resolve_source(source: str, allowed_roots: Sequence[str | os.PathLike[str]]) -> Path:
    """The existing file or directory that `source` names, links resolved.

    Raises:
        EngineRefused: another scheme, a relative path, outside every root (also by `..` or a link), or not there.
    """
    path = _local_path(source)
    real = Path(os.path.realpath(path))
    roots = [Path(os.path.realpath(root)) for root in allowed_roots]
    if not any(real == root or root in real.parents for root in roots):
        named = ", ".join(map(str, roots)) or "none"
        raise EngineRefused(f"source: {source!r} lies outside the allowed weight roots ({named})")
    if not real.exists():
        raise EngineRefused(f"source: {source!r} does not exist")
    return real


def _local_path(source: str) -> Path:
    if not source or "\0" in source:
        raise EngineRefused(f"source: {source!r} is not a path")
    path = source
    if "://" in source:
        url = urlsplit(source)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise EngineRefused(f"source: {source!r} is not a local path or a file:// URL")
        path = unquote(url.path)
    if not os.path.isabs(path):
        raise EngineRefused(f"source: {source!r} must be an absolute path")
    return Path(path)
