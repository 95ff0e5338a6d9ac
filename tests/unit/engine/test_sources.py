"""Which sources may be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from moebus.engine.port import EngineRefused
from moebus.engine.sources import resolve_source


def test_paths_and_urls_under_a_root(tmp_path: Path) -> None:
    root = tmp_path / "ck pt"
    root.mkdir()
    file = root / "w%41.safetensors"
    file.write_bytes(b"x")
    for source in (str(file), file.as_uri(), f"file://localhost{file.as_uri()[7:]}"):
        assert resolve_source(source, ["/nowhere", str(root)]) == file.resolve()
    assert resolve_source(str(root), [root]) == root.resolve()


def test_a_root_that_is_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "w").write_bytes(b"x")
    link = tmp_path / "link"
    link.symlink_to(real)
    assert resolve_source(str(link / "w"), [str(link)]) == real / "w"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "not a path"),
        ("a\0b", "not a path"),
        ("relative/w", "absolute"),
        ("file:relative", "absolute"),
        ("s3://bucket/w", "file://"),
        ("file://elsewhere/w", "file://"),
        ("/etc/passwd", "outside"),
        ("{root}/../x", "outside"),
        ("{root}-other/w", "outside"),
        ("file://{root}/%2e%2e/x", "outside"),
        ("{root}/none", "does not exist"),
    ],
)
def test_refused(tmp_path: Path, source: str, reason: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(EngineRefused, match=reason):
        resolve_source(source.format(root=root), [str(root)])


def test_without_roots_nothing_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match="none"):
        resolve_source(str(tmp_path), [])
