"""Reading weights from safetensors, checked whole before a caller sees any of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from moebus.engine.paddle.weights import DIGEST_KEY, Arrays, tensor_digest
from moebus.engine.port import Deadline, EngineRefused
from moebus.engine.sources import local_source
from moebus.engine.waiting import check_deadline

_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def load_weights(
    source: str, allowed_roots: Sequence[str], shapes: Mapping[str, tuple[int, ...]], deadline: Deadline
) -> Arrays:
    """All tensors of a safetensors file, or of a directory's `*.safetensors` shards together; local or behind a URL.

    Names, shapes and types are checked from the headers before the first value is read; each value against the
    digest that its file carries for it, if there is one (`save_weights` writes them).

    Raises:
        EngineRefused: a bad source, a file that is no safetensors (truncated, a pickle), or a tensor that is missing,
            unknown, in two shards, of another shape, not float32 or not of its digest.
        EngineTimeout: between two tensors.
    """
    with local_source(source, allowed_roots, pattern="*.safetensors", deadline=deadline) as path:
        return _load(_files(path, source), source, shapes, deadline)


def _load(files: Sequence[Path], source: str, shapes: Mapping[str, tuple[int, ...]], deadline: Deadline) -> Arrays:
    with ExitStack() as stack:
        owners: dict[str, Any] = {}
        for file in files:
            handle = stack.enter_context(_opened(file))
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                if name in owners:
                    raise EngineRefused(f"source: tensor {name!r} is in more than one file of {source}")
                owners[name] = handle
        _check(owners, shapes, source)
        arrays: Arrays = {}
        for name in shapes:
            check_deadline(deadline, f"reading {source}")
            arrays[name] = _read(owners[name], name, source)
            _check_digest(owners[name], name, arrays[name], source)
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


def _check(owners: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    missing = sorted(shapes.keys() - owners.keys())
    if missing:
        raise EngineRefused(f"source: tensor {missing[0]!r} is missing in {source} ({len(missing)} in all)")
    unknown = sorted(owners.keys() - shapes.keys())
    if unknown:
        raise EngineRefused(
            f"source: tensor {unknown[0]!r} in {source} is not one of this model ({len(unknown)} in all)"
        )
    for name, shape in shapes.items():
        info = owners[name].get_slice(name)
        if tuple(info.get_shape()) != shape:
            raise EngineRefused(f"source: tensor {name!r} has shape {info.get_shape()}, the model needs {list(shape)}")
        if info.get_dtype() != "F32":
            raise EngineRefused(f"source: tensor {name!r} is {info.get_dtype()}, the model needs F32")


def _check_digest(handle: Any, name: str, array: Any, source: str) -> None:
    wanted = (handle.metadata() or {}).get(DIGEST_KEY + name)
    if wanted is not None and wanted.lower() != tensor_digest(array):
        raise EngineRefused(
            f"source: tensor {name!r} of {source} does not have its digest {wanted}; the file is damaged"
        )


def _read(handle: Any, name: str, source: str) -> Any:
    from safetensors import SafetensorError

    try:
        return handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise EngineRefused(f"source: tensor {name!r} of {source} cannot be read ({error})") from error
