"""FastDeploy's local folder layout as a mirror.

Per layer `{folder}/{rollout id}/layer_{i}.pdtensor`, fused `{folder}/{rollout id}/{rollout id}.pdtensor`. Everything
happens inside one folder that carries our marker, by handles that follow no link; nothing outside is ever touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from moebus.consumers.store.mirrors.pdtensor import pdtensor
from moebus.consumers.store.mirrors.port import Layout, MirrorDown, Occupied, Shelf, Target
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import SettingsError

MARKER = ".moebus-mirror"
_TEXT = "This folder is a mirror that a moebus route store writes. It deletes what it put here and nothing else.\n"
_OURS = ".moebus"
_SUFFIX = ".pdtensor"
_MAX_NAME = 255
_LAYER = re.compile(r"layer_\d+")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderTarget(Target):
    """See `Target`. A rollout appears with all its files at once. Nothing is synced: it is a copy."""

    kind = "folder"
    forgets = False

    def __init__(self, folder: Path, owner: str) -> None:
        """`owner`: name of the store; what it left half written before is removed.

        Raises:
            SettingsError: the folder is not empty and has no marker, or cannot be used.
        """
        self.where = f"folder:{folder}"
        self._folder = folder
        self._mine = f"{_OURS}-{owner}-"
        try:
            _claim(folder)
            with self._root() as root:
                for name in os.listdir(root):
                    if name.startswith(self._mine):
                        _remove(root, name)
        except (OSError, MirrorDown) as error:
            raise SettingsError(f"store.mirrors: {folder} cannot be used: {error}") from None

    def refuses(self, rollout_id: str, layout: Layout) -> str | None:
        if "/" in rollout_id or "\0" in rollout_id or rollout_id in (".", "..") or rollout_id.startswith(_OURS):
            return "the id is no name of a folder"
        if layout != "layers" and len(rollout_id.encode()) + len(_SUFFIX) > _MAX_NAME:
            return "the id is too long for the name of a file"
        if layout == "both" and _LAYER.fullmatch(rollout_id):
            return "the id is the name of a layer"
        return None

    def put(self, shelf: Shelf, fused: RouteArray) -> None:
        fresh = self._fresh()
        with self._root() as root, _faults(self.where):
            os.mkdir(fresh, dir_fd=root)
            try:
                self._fill(root, fresh, shelf, fused)
                self._swap(root, fresh, shelf.rollout_id)
            except BaseException:
                _remove(root, fresh)
                raise

    def delete(self, shelves: Sequence[Shelf]) -> None:
        with self._root() as root, _faults(self.where):
            for shelf in shelves:
                old = self._fresh()
                with contextlib.suppress(FileNotFoundError, Occupied):
                    _check(root, shelf.rollout_id)
                    os.rename(shelf.rollout_id, old, src_dir_fd=root, dst_dir_fd=root)
                    _remove(root, old)

    def has(self, shelf: Shelf) -> bool:
        with self._root() as root, _faults(self.where):
            try:
                held = set(_list(root, shelf.rollout_id))
            except (FileNotFoundError, Occupied):
                return False
            return set(_names(shelf)) <= held

    def life(self) -> str:
        with self._root() as root:
            status = os.fstat(root)
        return f"{status.st_dev}:{status.st_ino}"

    def close(self) -> None:
        return None

    def _fill(self, root: int, folder: str, shelf: Shelf, fused: RouteArray) -> None:
        inside = os.open(folder, _FOLDER, dir_fd=root)
        try:
            if shelf.fused:
                _write(inside, f"{shelf.rollout_id}{_SUFFIX}", fused)
            if shelf.split:
                for layer, rows in enumerate(fused):
                    _write(inside, f"layer_{layer}{_SUFFIX}", rows)
        finally:
            os.close(inside)

    def _swap(self, root: int, fresh: str, name: str) -> None:
        old = None
        with contextlib.suppress(FileNotFoundError):
            _check(root, name)
            old = self._fresh()
            os.rename(name, old, src_dir_fd=root, dst_dir_fd=root)
        os.rename(fresh, name, src_dir_fd=root, dst_dir_fd=root)
        if old is not None:
            with contextlib.suppress(FileNotFoundError):
                _remove(root, old)

    def _fresh(self) -> str:
        return f"{self._mine}{secrets.token_hex(8)}"

    @contextmanager
    def _root(self) -> Iterator[int]:
        """The folder, as long as it carries the marker: a file system that is not mounted has none."""
        with _faults(self.where):
            root = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _faults(self.where):
                os.stat(MARKER, dir_fd=root, follow_symlinks=False)
            yield root
        finally:
            os.close(root)


@contextmanager
def _faults(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MirrorDown(f"{where}: {error.strerror}: {error.filename}") from error


def check_folder(folder: Path) -> None:
    """Raises SettingsError: a folder that is not empty and has no marker, no folder, or a path that is relative."""
    if not folder.is_absolute() or ".." in folder.parts:
        raise SettingsError(f"store.mirrors: {str(folder)!r} is no absolute path without '..'")
    try:
        if folder.exists() and not (folder / MARKER).is_file() and any(folder.iterdir()):
            raise SettingsError(
                f"store.mirrors: {folder} is not empty and has no {MARKER}: name a new or an empty folder"
            )
    except OSError as error:
        raise SettingsError(f"store.mirrors: {folder} cannot be used: {error.strerror}") from None


def _claim(folder: Path) -> None:
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / MARKER
    if not marker.is_file():
        marker.write_text(_TEXT)


def _names(shelf: Shelf) -> Iterator[str]:
    if shelf.fused:
        yield f"{shelf.rollout_id}{_SUFFIX}"
    if shelf.split:
        yield from (f"layer_{layer}{_SUFFIX}" for layer in range(shelf.layers))


def _check(root: int, name: str) -> None:
    """Raises Occupied where something lies that we never put there; FileNotFoundError where nothing does."""
    known = (f"{name}{_SUFFIX}",)
    for found in _list(root, name):
        if found not in known and not _LAYER.fullmatch(found.removesuffix(_SUFFIX)):
            raise Occupied(f"its folder holds {found!r}, which no mirror put there")


def _list(root: int, name: str) -> list[str]:
    try:
        handle = os.open(name, _FOLDER, dir_fd=root)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise Occupied("something that is no folder has its name") from None
        raise
    try:
        return os.listdir(handle)
    finally:
        os.close(handle)


def _write(folder: int, name: str, array: RouteArray) -> None:
    content = b"".join(pdtensor(np.ascontiguousarray(array)))
    handle = os.open(name, _NEW, 0o644, dir_fd=folder)
    try:
        done = 0
        while done < len(content):
            done += os.write(handle, memoryview(content)[done:])
    finally:
        os.close(handle)


def _remove(root: int, name: str) -> None:
    """A folder of files; a link in it goes, what it points to stays."""
    try:
        handle = os.open(name, _FOLDER, dir_fd=root)
    except FileNotFoundError:
        return
    try:
        for found in os.listdir(handle):
            os.unlink(found, dir_fd=handle)
    finally:
        os.close(handle)
    os.rmdir(name, dir_fd=root)
