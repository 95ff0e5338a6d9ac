"""Weight sources behind a URL."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from moebus.engine.port import EngineRefused, EngineTimeout
from moebus.engine.remote import check_url, is_remote
from moebus.engine.sources import local_source
from tests.support.deadlines import Polls
from tests.support.remote import ROOT, needs_fsspec, upload


@pytest.mark.parametrize(
    ("source", "root"),
    [
        ("s3://bucket/ckpt/812", "s3://bucket/ckpt"),
        ("s3://bucket/ckpt/812/", "s3://bucket/ckpt/"),
        ("s3://bucket/ckpt", "s3://bucket/ckpt"),
        ("S3://bucket/ckpt/w.safetensors", "s3://bucket"),
        ("gs://b/x", "GS://b"),
    ],
)
def test_urls_under_a_root(source: str, root: str) -> None:
    url = check_url(source, ["memory://other", root])
    assert url == f"{source.partition('://')[0].lower()}://{source.partition('://')[2].rstrip('/')}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("s3://bucket/ckpt-other/w", "outside the allowed weight roots"),
        ("s3://other/ckpt/w", "outside"),
        ("http://bucket/ckpt/w", "outside"),
        ("s3://bucket/ckpt/../secret", "not a plain URL"),
        ("s3://bucket/ckpt/./w", "not a plain URL"),
        ("s3://bucket/ckpt//w", "not a plain URL"),
        ("s3://bucket/ckpt/%2e%2e/w", "not a plain URL"),
        ("s3://bucket/ckpt/w?versionId=1", "not a plain URL"),
        ("s3://bucket/ckpt/w#x", "not a plain URL"),
        ("s3://bucket/ckpt/*", "not a plain URL"),
        ("simplecache::s3://bucket/ckpt/w", "not a plain URL"),
        ("s3://", "not a plain URL"),
        ("s3://key:secret@bucket/ckpt/w", "names a user"),
    ],
)
def test_urls_that_are_refused(source: str, reason: str) -> None:
    with pytest.raises(EngineRefused, match=reason) as caught:
        check_url(source, ["s3://bucket/ckpt"])
    assert "secret@" not in str(caught.value)


def test_local_files_are_not_remote_however_they_are_spelt() -> None:
    assert [is_remote(text) for text in ("/a", "file:///a", "FILE:///a", "local:///a", "s3://a")] == [False] * 4 + [
        True
    ]


def test_a_path_is_never_under_a_url_and_a_url_never_under_a_path(tmp_path: Path) -> None:
    for source, roots in ((str(tmp_path), [ROOT]), (f"{ROOT}/w", [str(tmp_path), "/"]), ("local:///etc", ["/"])):
        with pytest.raises(EngineRefused, match="source"), local_source(source, roots):
            pytest.fail("allowed")


@needs_fsspec
def test_a_file_is_a_copy_that_goes_away(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"weights")
    with local_source(upload(tmp_path / "w.safetensors"), [ROOT]) as path:
        assert (path.name, path.read_bytes()) == ("w.safetensors", b"weights")
    assert not path.exists()


@needs_fsspec
def test_of_a_directory_only_what_is_wanted_is_copied(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors", "optimizer.pt"):
        (folder / name).write_bytes(name.encode())
    with local_source(upload(folder), [ROOT], pattern="*.safetensors") as path:
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {
            "a.safetensors": b"a.safetensors", "b.safetensors": b"b.safetensors",
        }  # fmt: skip


@needs_fsspec
def test_nothing_there_and_unknown_schemes_are_refused() -> None:
    with pytest.raises(EngineRefused, match="cannot be read"), local_source(f"{ROOT}/none", [ROOT]):
        pytest.fail("read")
    with pytest.raises(EngineRefused, match="cannot be read"), local_source("nosuch://a/b", ["nosuch://a"]):
        pytest.fail("read")


@needs_fsspec
def test_the_deadline_and_the_free_space_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w").write_bytes(b"weights")
    url = upload(tmp_path / "w")
    with pytest.raises(EngineTimeout, match="reading"), local_source(url, [ROOT], deadline=Polls(0)):
        pytest.fail("read")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 3})())
    with pytest.raises(EngineRefused, match="larger than what is free"), local_source(url, [ROOT]):
        pytest.fail("read")
    assert not list(Path(tempfile.gettempdir()).glob("moebus-weights-*/w"))


def test_without_fsspec_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(EngineRefused, match=r"pip install 'moebus\[fsspec\]'"), local_source(f"{ROOT}/w", [ROOT]):
        pytest.fail("read")
