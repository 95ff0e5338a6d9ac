"""Mirrors of a running store, read by what is not ours: `paddle.load`, and p2pstore's own client over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.consumers.store import StoreOptions
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.mirrors.folder import MARKER
from moebus.observability.settings import MirrorSettings, StoreSettings
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import SettingsError
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Base, Clear, Delete, Outcome
from tests.integration.store.test_full import disk
from tests.support.routes import CARD, Attempt, attempt_id, make_attempt
from tests.support.store import SMALL, Rig, error_of
from tests.support.wait import wait_until

MAX = 32
SETTINGS = MirrorSettings(layout="both", max_model_len=MAX, shared_experts=1, run="run", timeout=5.0, protocol="tcp")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "data")


def folder_options(folder: Path, settings: MirrorSettings = SETTINGS) -> StoreOptions:
    return replace(SMALL, mirrors=(f"folder:{folder}",), mirror=settings)


def padded(routes: RouteArray) -> RouteArray:
    """[L, M, K] by the definition: rows of all layers, then all ones."""
    rows, layers, top_k = routes.shape
    full = np.full((layers, MAX, top_k), 255, np.uint8)
    for layer in range(layers):
        for row in range(rows):
            full[layer, row] = routes[row, layer]
    return full


def seen(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".moebus"))


def content(file: Path) -> bytes:
    """Nothing where it is being replaced."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_bytes()
    return b""


def mirrored(folder: Path, *ids: str) -> None:
    wait_until(lambda: seen(folder) == sorted(ids), 30, f"exactly {ids} in the mirror")


@pytest.mark.paddle
def test_a_folder_is_what_paddle_loads(rig: Rig, tmp_path: Path) -> None:
    from moebus.engine.paddle import load_paddle

    def paddle_load(path: Path) -> Any:
        return load_paddle().load(str(path), return_numpy=True)

    folder = tmp_path / "mirror"
    small = make_attempt("a:0:0:0", number=1, rows=20, chunks=3)
    wide = make_attempt("b", number=2, rows=4, card=ModelCard(300, 3, (0, 4)))
    with rig.running(options=folder_options(folder)):
        rig.put(small, wide)
        mirrored(folder, "a:0:0:0", "b")
    want = padded(small.routes)
    np.testing.assert_array_equal(paddle_load(folder / "a:0:0:0" / "a:0:0:0.pdtensor"), want)
    for layer in range(3):
        found = paddle_load(folder / "a:0:0:0" / f"layer_{layer}.pdtensor")
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, want[layer])
    fused = paddle_load(folder / "b" / "b.pdtensor")
    assert (fused.dtype, fused.shape) == (np.uint16, (2, MAX, 3))
    np.testing.assert_array_equal(fused[:, :4].transpose(1, 0, 2), wide.routes)
    assert (fused[:, 4:] == 65535).all()


def test_only_what_a_trainer_looks_for(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    rig.put(
        make_attempt("complete", number=1),
        make_attempt("partial", number=2, outcome=Outcome("partial")),
        make_attempt("aborted", number=3, outcome=Outcome("aborted")),
        make_attempt("other", number=4, run="another"),
        make_attempt("choice", number=5, choice=1),
        make_attempt("empty", number=6, rows=0, chunks=0),
        make_attempt("long", number=7, rows=MAX + 1),
        make_attempt("exact", number=8, rows=MAX),
        make_attempt("two", number=9),
        make_attempt("two", number=10, rows=3),
    )
    with rig.running(options=folder_options(folder)):
        mirrored(folder, "complete", "exact", "two")
        held = rig.metrics.value
        wait_until(lambda: held("moebus_mirror_held", mirror="folder") == 3, 30, "three held")
        refused = held("moebus_mirror_operations_total", mirror="folder", operation="put", outcome="refused")
        assert refused in (2, 3, 4), "two, and again where the first look around falls among the commits"
        assert held("moebus_mirror_up", mirror="folder") == 1
    newest = (folder / "two" / "layer_0.pdtensor").read_bytes()
    rows = make_attempt("two", number=10, rows=3).routes[:, 0]
    assert rows.tobytes() + b"\xff" * (MAX - 3) * 2 in newest


def test_whatever_removes_reaches_the_mirror(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    options = replace(folder_options(folder), rules=Rules(last_turn=True, keep_ttl_ms=3_600_000))
    first = make_attempt("t:0:0:0", number=1, rows=6, group="g")
    second = make_attempt("t:0:1:0", number=2, rows=3, base=Base(attempt_id(1), 6, "t:0:0:0"), group="g")
    rig.put(first, make_attempt("a:1", number=3), make_attempt("a:10", number=4), make_attempt("c", number=5, epoch=2))
    with rig.running(options=options):
        mirrored(folder, "t:0:0:0", "a:1", "a:10", "c")
        rig.put(second)
        mirrored(folder, "t:0:1:0", "a:1", "a:10", "c")
        rig.fence(Delete("run", "a:1", attempt_id(50)))
        mirrored(folder, "t:0:1:0", "a:10", "c")
        rig.fence(Clear("run", 1, attempt_id(51)))
        mirrored(folder, "c")


def test_a_restart_catches_up(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    rig.put(make_attempt("gone", number=1), make_attempt("stays", number=2), make_attempt("again", number=3))
    with rig.running(options=folder_options(folder)):
        mirrored(folder, "again", "gone", "stays")
    stamp = (folder / "stays" / "layer_0.pdtensor").stat().st_mtime_ns
    with rig.running():  # without the mirror
        rig.fence(Delete("run", "gone", attempt_id(50)))
        rig.fence(Delete("run", "again", attempt_id(51)))
        rig.put(make_attempt("again", number=4, epoch=1, rows=7), make_attempt("new", number=5))
    with rig.running(options=folder_options(folder)):
        mirrored(folder, "again", "new", "stays")
        want = padded(make_attempt("again", number=4, rows=7).routes)[2].tobytes()
        wait_until(lambda: want in content(folder / "again" / "layer_2.pdtensor"), 30, "the later attempt")
        assert (folder / "stays" / "layer_0.pdtensor").stat().st_mtime_ns == stamp
    with rig.running(options=folder_options(folder, SETTINGS.model_copy(update={"layout": "layers"}))):
        fused = str(folder / "*" / "[!l]*.pdtensor")  # what is being removed is none, where `Path.glob` raises
        wait_until(lambda: not glob.glob(fused), 30, "the other layout")
        mirrored(folder, "again", "new", "stays")


def test_a_target_that_is_away(rig: Rig, tmp_path: Path) -> None:
    folder, away = tmp_path / "mirror", tmp_path / "away"
    rig.put(make_attempt("before", number=1))
    with rig.running(options=folder_options(folder)) as store:
        mirrored(folder, "before")
        folder.rename(away)
        folder.mkdir()  # as a mount point without its file system
        rig.put(*(make_attempt(f"r{number}", number=number) for number in range(2, 6)))
        rig.fence(Delete("run", "before", attempt_id(50)))
        rig.caught_up(store)  # ingest does not care
        assert store.waiting() is None
        up = rig.metrics.value
        wait_until(lambda: up("moebus_mirror_up", mirror="folder") == 0, 30, "the mirror to be down")
        assert list(folder.iterdir()) == []
        folder.rmdir()
        away.rename(folder)
        mirrored(folder, "r2", "r3", "r4", "r5")
        assert up("moebus_mirror_operations_total", mirror="folder", operation="put", outcome="failed") > 0


def test_a_full_disk_under_a_mirror(rig: Rig, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "1m") as small:
        wide = SETTINGS.model_copy(update={"max_model_len": 20_000})  # 240 KB each, in both layouts
        with rig.running(options=folder_options(small / "mirror", wide)) as store:
            rig.put(*(make_attempt(f"r{number}", number=number) for number in range(1, 9)))
            rig.caught_up(store)
            value = rig.metrics.value
            wait_until(lambda: value("moebus_mirror_up", mirror="folder") == 0, 30, "a full mirror")
            held = set(seen(small / "mirror"))
            assert 1 <= len(held) < 8
            for name in held:
                rig.fence(Delete("run", name, attempt_id(50)))
            wait_until(lambda: held.isdisjoint(seen(small / "mirror")), 30, "what was deleted to be gone")
            wait_until(lambda: len(seen(small / "mirror")) >= 1, 30, "others in their place")
            assert store.waiting() is None
        whole = {path.name for path in (small / "mirror").glob("*/*.pdtensor")}
        assert all(len(list(path.iterdir())) == 4 for path in (small / "mirror").iterdir() if path.is_dir()), whole


HOSTILE = [
    "../outside", "/etc/passwd", "..", ".", "a/../../b", "x/y", MARKER, ".moebus-s1-0", "~", "$HOME", "a\nb", "-rf",
    "x" * 255, "é" * 127, "layer_0", "\x01", "..\\..", "con",
]  # fmt: skip


def test_hostile_ids_stay_inside(rig: Rig, tmp_path: Path) -> None:
    top = tmp_path / "top"
    folder = top / "mirror"
    victim = top / "outside"
    victim.mkdir(parents=True)
    (victim / "precious").write_text("x")
    (victim / "layer_0.pdtensor").write_text("x")
    rig.put(*(make_attempt(rollout_id, number=number) for number, rollout_id in enumerate(HOSTILE, 1)))
    safe = {"~", "$HOME", "a\nb", "-rf", "\x01", "..\\..", "con"}
    with rig.running(options=folder_options(folder)) as store:
        mirrored(folder, *safe)
        rig.put(make_attempt("link", number=90))
        mirrored(folder, *safe, "link")
        for path in (folder / "link").iterdir():
            path.unlink()
        (folder / "link").rmdir()
        (folder / "link").symlink_to(victim)
        for number, rollout_id in enumerate([*HOSTILE, "link"], 100):
            rig.fence(Delete("run", rollout_id, attempt_id(number)))
        rig.caught_up(store)
        mirrored(folder, "link")  # not ours any more
        rig.put(make_attempt("link", number=91, epoch=1))
        refused = rig.metrics.value
        wait_until(lambda: refused("moebus_mirror_waiting", mirror="folder") == 0, 30, "nothing to wait")
        assert store.waiting() is None
    assert (folder / "link").is_symlink()
    assert sorted(path.name for path in top.iterdir()) == ["mirror", "outside"]
    assert sorted(path.name for path in victim.iterdir()) == ["layer_0.pdtensor", "precious"]
    assert (folder / MARKER).is_file()


def test_what_is_no_folder_of_ours_is_refused(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    store = rig.store(options=folder_options(folder))
    with pytest.raises(SettingsError, match=f"is not empty and has no {MARKER}"):
        store.start()
    store.stop()
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


# p2pstore


class Redis:
    """A real redis-server, which forgets when it is stopped."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self._folder = folder
        self.start()

    def start(self) -> None:
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), *options], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        ping = ["redis-cli", "-p", str(self.port), "ping"]
        wait_until(lambda: subprocess.run(ping, capture_output=True, check=False).stdout == b"PONG\n", 30, "Redis")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    from moebus.consumers.store.mirrors.p2pstore import _address

    made = Redis(tmp_path, int(_address("").rpartition(":")[2]))
    yield made
    made.stop()


class Trainer:
    """p2pstore's own client."""

    def __init__(self, port: int) -> None:
        from moebus.consumers.store.mirrors.p2pstore import _connect

        self.client: Any = _connect(f"redis://127.0.0.1:{port}", SETTINGS)

    def get(self, key: str) -> Any:
        return asyncio.run(self.client.get(key))

    def keys(self) -> list[str]:
        return sorted(self.client.list())

    def wait_for(self, *ids: str) -> None:
        want = sorted(key for one in ids for key in (one, *(f"{one}_{layer}" for layer in range(3))))
        wait_until(lambda: self.keys() == want, 30, f"exactly the keys of {ids}")

    def check(self, attempt: Attempt) -> None:
        want, name = padded(attempt.routes), attempt.header.rollout_id
        assert self.get(name) == want.tobytes()
        for layer in range(len(CARD.moe_layers)):
            found = self.get(f"{name}_{layer}")
            assert (found.dtype, found.shape) == (np.uint8, (MAX, CARD.top_k))
            np.testing.assert_array_equal(found, want[layer])


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # p2pstore's, of redis-py
def test_p2pstore(rig: Rig, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    options = replace(SMALL, mirrors=(f"p2pstore:redis://127.0.0.1:{redis.port}",), mirror=SETTINGS)
    first = [make_attempt(f"a:{number}", number=number, rows=9, chunks=2) for number in (1, 2, 10)]
    late = make_attempt("b", number=20)
    rig.put(*first, make_attempt("88888888", number=30))
    with rig.running(options=options) as store:
        trainer = Trainer(redis.port)
        trainer.wait_for("a:1", "a:2", "a:10")
        for attempt in first:
            trainer.check(attempt)
        rig.fence(Delete("run", "a:1", attempt_id(50)))
        trainer.wait_for("a:2", "a:10")
        redis.stop()
        rig.put(late)
        rig.fence(Delete("run", "a:2", attempt_id(51)))
        rig.caught_up(store)
        assert error_of(store, "b") == "none"
        assert store.waiting() is None
        redis.start()  # with nothing
        trainer.wait_for("a:10", "b")
        trainer.check(late)
    with rig.running(options=options):  # what it held went with the process
        trainer.wait_for("a:10", "b")
        wait_until(lambda: trainer.get("b") is not None, 30, "the bytes of b again")
        trainer.check(first[2])
        rig.fence(Delete("run", "a", attempt_id(52)))
        trainer.wait_for("b")
    trainer.client.close()
    assert list(here.iterdir()) == []  # no p2pstorelog


@pytest.mark.parametrize(
    ("mirrors", "text"),
    [
        (("ftp:/x",), "store.mirrors: 'ftp:/x' is unknown"),
        (("folder:relative",), "store.mirrors: 'relative' is no absolute path"),
        (("folder:/a/../b",), "store.mirrors: '/a/../b' is no absolute path"),
        (("folder:/etc",), "store.mirrors: /etc is not empty"),
        (("p2pstore:http://h:1",), "store.mirrors: 'http://h:1' is not like redis://host:port"),
        (("p2pstore:redis://:hush@h:1",), "store.mirrors: 'h:1' is not like redis://host:port"),
        (("folder:/tmp/moebus-none", "folder:/tmp/moebus-none"), "store.mirrors: one of them is named twice"),
    ],
)
def test_wrong_mirrors_are_named(mirrors: tuple[str, ...], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        StoreOptions.of(StoreSettings(mirrors=mirrors, mirror=SETTINGS))
    assert str(caught.value).startswith(text)
    assert "hush" not in str(caught.value)


def test_a_mirror_needs_the_length_that_fastdeploy_pads_to(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^store\.mirror\.max_model_len: "):
        StoreOptions.of(StoreSettings(mirrors=(f"folder:{tmp_path / 'm'}",)))
