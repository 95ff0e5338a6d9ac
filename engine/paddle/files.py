"""Reading weights from safetensors, checked whole before a caller sees any of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.hf import is_hf, recipes
from moebus.engine.paddle.weights import DIGEST_KEY, Arrays, tensor_digest
from moebus.engine.port import Deadline, EngineRefused
from moebus.engine.sources import local_source
from moebus.engine.waiting import check_deadline

_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


_HF_TYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class _Owner:
    """Where a tensor is: an open file of safetensors, and its path."""

    handle: Any
    file: Path


def load_weights(
    source: str, allowed_roots: Sequence[str], shapes: Mapping[str, tuple[int, ...]], deadline: Deadline
) -> Arrays:
    """All tensors of a safetensors file, or of a directory's `*.safetensors` shards together; local or behind a URL.

    Tensors have the names of this engine, or those of Hugging Face's Mixtral and Qwen-MoE (see `hf`), which may be
    bfloat16 or float16. Names, shapes and types are checked from the headers before the first value is read; each
    tensor against the digest that its file carries for it, if there is one (`save_weights` writes them).

    Raises:
        EngineRefused: a bad source, a file that is no safetensors (truncated, a pickle), or a tensor that is missing,
            unknown, in two shards, of another shape, not float32 or not of its digest.
        EngineTimeout: between two tensors.
    """
    with local_source(source, allowed_roots, pattern="*.safetensors", deadline=deadline) as path:
        return _load(_files(path, source), source, shapes, deadline)


def _load(files: Sequence[Path], source: str, shapes: Mapping[str, tuple[int, ...]], deadline: Deadline) -> Arrays:
    with ExitStack() as stack:
        owners: dict[str, _Owner] = {}
        for file in files:
            handle = stack.enter_context(_opened(file))
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                if name in owners:
                    raise EngineRefused(f"source: tensor {name!r} is in more than one file of {source}")
                owners[name] = _Owner(handle, file)
        if is_hf(owners):
            return _load_hf(owners, source, shapes, deadline)
        _check(owners, shapes, source)
        arrays: Arrays = {}
        for name in shapes:
            check_deadline(deadline, f"reading {source}")
            arrays[name] = _read(owners[name], name, source)
        return arrays


def _load_hf(
    owners: Mapping[str, _Owner], source: str, shapes: Mapping[str, tuple[int, ...]], deadline: Deadline
) -> Arrays:
    """Weights by Hugging Face's names, as float32."""
    found = recipes(shapes, owners)
    for name, recipe in found.items():
        shape = shapes[name][1:] if recipe.stacked else shapes[name]
        for one in recipe.sources:
            _check_one(owners[one], one, shape[::-1] if recipe.transposed else shape, _HF_TYPES)
    arrays: Arrays = {}
    for name, recipe in found.items():
        check_deadline(deadline, f"reading {source}")
        parts = [_read(owners[one], one, source) for one in recipe.sources]
        parts = [np.ascontiguousarray(part.T) if recipe.transposed else part for part in parts]
        arrays[name] = np.stack(parts) if recipe.stacked else parts[0]
    return arrays


def _files(path: Path, source: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise EngineRefused(f"source: {source} holds no *.safetensors file")
    return files


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with file.open("rb") as stream:
            start = stream.read(4)
        if start.startswith(_PICKLE_STARTS):
            raise EngineRefused(f"source: {file} is a pickle, which can run code; only safetensors are read")
        opened = safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise EngineRefused(f"source: {file} is not a whole safetensors file ({error})") from error
    with opened as handle:
        yield handle


def _check(owners: Mapping[str, _Owner], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    missing = sorted(shapes.keys() - owners.keys())
    if missing:
        raise EngineRefused(f"source: tensor {missing[0]!r} is missing in {source} ({len(missing)} in all)")
    unknown = sorted(owners.keys() - shapes.keys())
    if unknown:
        raise EngineRefused(
            f"source: tensor {unknown[0]!r} in {source} is not one of this model ({len(unknown)} in all)"
        )
    for name, shape in shapes.items():
        _check_one(owners[name], name, shape, ("F32",))


def _check_one(owner: _Owner, name: str, shape: tuple[int, ...], types: Sequence[str]) -> None:
    info = owner.handle.get_slice(name)
    if tuple(info.get_shape()) != shape:
        raise EngineRefused(f"source: tensor {name!r} has shape {info.get_shape()}, the model needs {list(shape)}")
    if info.get_dtype() not in types:
        raise EngineRefused(f"source: tensor {name!r} is {info.get_dtype()}, the model needs {' or '.join(types)}")


def _read(owner: _Owner, name: str, source: str) -> npt.NDArray[np.float32]:
    """The values as float32, checked against the digest that the file has for them."""
    from safetensors import SafetensorError

    try:
        if owner.handle.get_slice(name).get_dtype() == "BF16":
            values = _bf16(owner.file, name)
        else:
            values = owner.handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise EngineRefused(f"source: tensor {name!r} of {source} cannot be read ({error})") from error
    array: npt.NDArray[np.float32] = values.astype(np.float32, copy=False)
    wanted = (owner.handle.metadata() or {}).get(DIGEST_KEY + name)
    if wanted is not None and wanted.lower() != tensor_digest(array):
        raise EngineRefused(f"source: tensor {name!r} of {source} does not have its digest {wanted}; it is damaged")
    return array


def _bf16(file: Path, name: str) -> npt.NDArray[np.float32]:
    """bfloat16 values, which numpy does not know, as float32: they are its upper halves."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        entry = json.loads(stream.read(size))[name]  # a header that safetensors has checked
        start, stop = entry["data_offsets"]
        stream.seek(8 + size + start)
        halves = np.frombuffer(stream.read(stop - start), dtype="<u2")
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
