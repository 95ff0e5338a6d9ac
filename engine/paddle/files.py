"""Reading weights from safetensors, checked whole before a caller sees any of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from moebus.engine.paddle.weights import Arrays
from moebus.engine.port import Deadline, EngineRefused
from moebus.engine.sources import resolve_source
from moebus.engine.waiting import check_deadline

_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def load_weights(
    source: str, allowed_roots: Sequence[str], shapes: Mapping[str, tuple[int, ...]], deadline: Deadline
) -> Arrays:
    """All tensors of a safetensors file, or of a directory's `*.safetensors` shards together.

    Names, shapes and types are checked from the headers before the first value is read.

    Raises:
        EngineRefused: a bad source, a file that is no safetensors (truncated, a pickle), or a tensor that is missing,
            unknown, in two shards, of another shape or not float32.
        EngineTimeout: between two tensors.
    """
    path = resolve_source(source, allowed_roots)
    with ExitStack() as stack:
        owners: dict[str, Any] = {}
        for file in _files(path):
            handle = stack.enter_context(_opened(file))
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                if name in owners:
                    raise EngineRefused(f"source: tensor {name!r} is in more than one file of {path}")
                owners[name] = handle
        _check(owners, shapes, path)
        arrays: Arrays = {}
        for name in shapes:
            check_deadline(deadline, f"reading {path}")
            arrays[name] = _read(owners[name], name, path)
        return arrays


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise EngineRefused(f"source: {path} holds no *.safetensors file")
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


def _check(owners: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    missing = sorted(shapes.keys() - owners.keys())
    if missing:
        raise EngineRefused(f"source: tensor {missing[0]!r} is missing in {path} ({len(missing)} in all)")
    unknown = sorted(owners.keys() - shapes.keys())
    if unknown:
        raise EngineRefused(f"source: tensor {unknown[0]!r} in {path} is not one of this model ({len(unknown)} in all)")
    for name, shape in shapes.items():
        info = owners[name].get_slice(name)
        if tuple(info.get_shape()) != shape:
            raise EngineRefused(f"source: tensor {name!r} has shape {info.get_shape()}, the model needs {list(shape)}")
        if info.get_dtype() != "F32":
            raise EngineRefused(f"source: tensor {name!r} is {info.get_dtype()}, the model needs F32")


def _read(handle: Any, name: str, path: Path) -> Any:
    from safetensors import SafetensorError

    try:
        return handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise EngineRefused(f"source: tensor {name!r} of {path} cannot be read ({error})") from error
