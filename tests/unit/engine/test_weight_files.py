"""Weights on disk: what is written, what is read, and what is refused before anything is."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moebus.engine.paddle.files import load_weights
from moebus.engine.paddle.weights import (
    Arrays,
    random_weights,
    save_weights,
    tensor_digest,
    weight_shapes,
    weights_digest,
)
from moebus.engine.port import EngineRefused, EngineTimeout
from tests.support.deadlines import Left, Polls
from tests.support.paddle import SMALL

SHAPES = weight_shapes(SMALL)
ROUTER = "layers.1.moe.router.weight"


def load(path: Path) -> Arrays:
    return load_weights(str(path), [str(path.parent)], SHAPES, Left())


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    arrays = random_weights(SMALL, 3)
    path = tmp_path / "w.safetensors"
    save_weights(path, random_weights(SMALL, 4))
    save_weights(path, arrays)
    back = load(path)
    assert list(back) == list(SHAPES)
    assert all(np.array_equal(back[name], array) for name, array in arrays.items())
    assert weights_digest(back) == weights_digest(arrays)
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


def test_shards_of_a_directory_are_one_set(tmp_path: Path) -> None:
    arrays = random_weights(SMALL, 3)
    names = list(arrays)
    (tmp_path / "config.json").write_text("{}")
    for part in range(3):
        save_weights(tmp_path / f"{part}.safetensors", {name: arrays[name] for name in names[part::3]})
    assert weights_digest(load_weights(str(tmp_path), [str(tmp_path)], SHAPES, Left())) == weights_digest(arrays)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for part in "ab":
        save_weights(tmp_path / f"{part}.safetensors", random_weights(SMALL, 3))
    with pytest.raises(EngineRefused, match="more than one file"):
        load_weights(str(tmp_path), [str(tmp_path)], SHAPES, Left())


def test_a_directory_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match=r"no \*\.safetensors"):
        load_weights(str(tmp_path), [str(tmp_path)], SHAPES, Left())


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(path, random_weights(SMALL, 3))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_weights(path, random_weights(SMALL, 4))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def _truncated(path: Path, arrays: Arrays) -> None:
    save_weights(path, arrays)
    path.write_bytes(path.read_bytes()[:-100])


def _truncated_header(path: Path, arrays: Arrays) -> None:
    save_weights(path, arrays)
    path.write_bytes(path.read_bytes()[:40])


BAD: dict[str, tuple[Callable[[Path, Arrays], object], str]] = {
    "missing": (lambda p, a: save_file({n: v for n, v in a.items() if n != ROUTER}, p), f"{ROUTER}.*missing"),
    "extra": (lambda p, a: save_file(a | {"lm.bias": np.zeros(3, np.float32)}, p), "lm.bias.*not one of"),
    "shape": (lambda p, a: save_file(a | {ROUTER: a[ROUTER].T.copy()}, p), f"{ROUTER}.*shape"),
    "flat": (lambda p, a: save_file(a | {ROUTER: a[ROUTER].reshape(-1)}, p), f"{ROUTER}.*shape"),
    "float16": (lambda p, a: save_file(a | {ROUTER: a[ROUTER].astype(np.float16)}, p), f"{ROUTER}.*F16"),
    "float64": (lambda p, a: save_file(a | {ROUTER: a[ROUTER].astype(np.float64)}, p), f"{ROUTER}.*F64"),
    "truncated": (_truncated, "not a whole safetensors"),
    "truncated header": (_truncated_header, "not a whole safetensors"),
    "empty": (lambda p, a: p.write_bytes(b""), "not a whole safetensors"),
    "noise": (lambda p, a: p.write_bytes(bytes(range(256)) * 40), "not a whole safetensors"),
    "pickle": (lambda p, a: p.write_bytes(pickle.dumps(a)), "pickle"),
    "old pickle": (lambda p, a: p.write_bytes(pickle.dumps({"a": 1}, protocol=2)), "pickle"),
    "zip of pickles": (lambda p, a: p.write_bytes(b"PK\x03\x04" + bytes(100)), "pickle"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused(tmp_path: Path, kind: str) -> None:
    write, text = BAD[kind]
    path = tmp_path / "w.safetensors"
    write(path, random_weights(SMALL, 3))
    with pytest.raises(EngineRefused, match=text):
        load(path)


def test_a_tensor_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    arrays = random_weights(SMALL, 3)
    save_weights(path, arrays)
    good = path.read_bytes()
    values = arrays[ROUTER].tobytes()
    at = good.index(values)
    path.write_bytes(good[: at + 9] + bytes([good[at + 9] ^ 1]) + good[at + 10 :])
    with pytest.raises(EngineRefused, match=f"{ROUTER}.*does not have its digest {tensor_digest(arrays[ROUTER])}"):
        load(path)
    save_file(arrays, path)  # a file without digests is read all the same
    assert weights_digest(load(path)) == weights_digest(arrays)


def test_the_digest_of_a_tensor_sees_its_shape() -> None:
    flat = np.arange(6, dtype=np.float32)
    assert len({tensor_digest(flat), tensor_digest(flat.reshape(2, 3)), tensor_digest(flat.reshape(3, 2))}) == 3
    assert tensor_digest(flat[::2]) == tensor_digest(np.asarray([0, 2, 4], np.float32))
    assert tensor_digest(flat) == tensor_digest(flat.astype(">f4"))


def test_a_header_that_claims_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(EngineRefused, match="not a whole safetensors"):
        load(path)


def test_the_deadline_is_kept_between_tensors(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(path, random_weights(SMALL, 3))
    with pytest.raises(EngineTimeout, match="reading"):
        load_weights(str(path), [str(tmp_path)], SHAPES, Polls(3))


def test_the_digest_sees_every_change_and_no_order() -> None:
    arrays = random_weights(SMALL, 3)
    digest = weights_digest(arrays)
    assert weights_digest(dict(reversed(arrays.items()))) == digest
    bent = arrays[ROUTER].copy()
    bent[-1, -1] = np.nextafter(bent[-1, -1], np.float32(1))
    others = [
        arrays | {ROUTER: bent},
        arrays | {ROUTER: arrays[ROUTER].reshape(SMALL.num_experts, -1)},
        {(name if name != ROUTER else "x"): array for name, array in arrays.items()},
        random_weights(SMALL, 4),
    ]
    assert digest not in [weights_digest(other) for other in others]


def test_the_digest_is_stable_between_releases() -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.asarray([1.5], np.float32)}
    assert weights_digest(arrays) == "d9fcadf96513f1eb8fc90282bb62197e"


def test_seeded_weights_repeat_and_differ_by_seed() -> None:
    assert weights_digest(random_weights(SMALL, 1)) == weights_digest(random_weights(SMALL, 1))
    assert weights_digest(random_weights(SMALL, 1)) != weights_digest(random_weights(SMALL, 2))
