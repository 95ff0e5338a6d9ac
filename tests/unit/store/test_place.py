"""Where blobs lie, as settings say it; names and entries; answers that are shared."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from moebus.consumers.store.blobs.parts import parts_of
from moebus.consumers.store.blobs.place import Place, check_endpoint, read_place
from moebus.consumers.store.blobs.pointer import ObjectName, Pointer, follows
from moebus.schemas.errors import SettingsError
from tests.support.cli import run_command


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("lmdb", None),
        ("file:///mnt/large", Place(path=Path("/mnt/large"))),
        ("file://localhost/mnt/with%20space", Place(path=Path("/mnt/with space"))),
        ("s3://bucket", Place(bucket="bucket")),
        ("s3://bucket/", Place(bucket="bucket")),
        ("s3://my.bucket-1/a/b/", Place(bucket="my.bucket-1", prefix="a/b")),
    ],
)
def test_places(text: str, place: Place | None) -> None:
    assert read_place(text) == place


WRONG = [
    "", "LMDB", "memory", "/mnt/x", "file:relative", "file://", "file:///", "file://host/x", "file:///a/../b", "s3://",
    "s3:///x", "s3://b", "s3://-bucket/x", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/x?versionId=1",
    "s3://bucket:9000/x", "gs://bucket/x", "http://host/bucket", "s3://[bucket/x", "s3://key:hush@bucket/x",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_wrong_places_are_named(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^store\.blobs: ") as caught:
        read_place(text)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "minio:9000", "ftp://h", "http://", "http://h:99999", "https://u:p@h"])
def test_wrong_endpoints_are_named(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^store\.blobs_endpoint: "):
        check_endpoint(text)


def test_endpoints() -> None:
    assert check_endpoint(None) is None
    assert check_endpoint("http://127.0.0.1:9000/") == "http://127.0.0.1:9000"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--blobs", "ftp://x"), "store.blobs: 'ftp://x' is unknown"),
        (("--blobs", "s3://bucket/x", "--blobs-endpoint", "minio"), "store.blobs_endpoint: 'minio'"),
        (("--mirror", "folder:x"), "store.mirrors: 'x' is no absolute path"),
        (("--mirror", "folder:/etc"), "store.mirrors: /etc is not empty"),
        (("--mirror", "folder:/tmp/moebus-none"), "store.mirror.max_model_len: "),
    ],
)
def test_a_store_does_not_start_with_them(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    ran = run_command("store", "--data-dir", str(tmp_path / "data"), *arguments)
    assert ran.code == 2
    assert text in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert not (tmp_path / "data").exists()


def test_names_and_entries_come_back() -> None:
    name = ObjectName(2**64 - 1, 2**32 - 1, 2**63, 7, b"\0" * 15 + b"\xff")
    assert ObjectName.parse(str(name)) == name
    pointer = Pointer(name, 2**32 - 1, 5)
    assert Pointer.unpack(2**63, pointer.pack()) == pointer
    for text in ("", "probe", f"{name}x", f"x{name}", str(name).upper(), str(name).replace("/", "-")):
        assert ObjectName.parse(text) is None


def test_neighbours() -> None:
    name, other = ObjectName(1, 2, 3, 0, b"a" * 16), ObjectName(1, 3, 3, 0, b"a" * 16)
    assert follows(Pointer(name, 0, 5), Pointer(name, 5, 1))
    assert not follows(Pointer(name, 0, 5), Pointer(name, 6, 1))
    assert not follows(Pointer(name, 0, 5), Pointer(other, 5, 1))


def test_parts_of_an_answer() -> None:
    whole: Future[bytes] = Future()
    parts = parts_of(whole, [2, 0, 3])
    assert not any(part.done() for part in parts)
    whole.set_result(b"abcde")
    assert [part.result() for part in parts] == [b"ab", b"", b"cde"]
    broken: Future[bytes] = Future()
    parts = parts_of(broken, [1, 1])
    broken.set_exception(KeyError("x"))
    assert all(isinstance(part.exception(), KeyError) for part in parts)
    stopped: Future[bytes] = Future()
    parts = parts_of(stopped, [1, 1])
    stopped.cancel()
    assert all(part.cancelled() for part in parts)
