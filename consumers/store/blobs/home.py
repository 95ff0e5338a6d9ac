"""Opening the place of a store's objects."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from moebus.consumers.store.blobs.place import Place
from moebus.schemas.errors import SettingsError

if TYPE_CHECKING:
    from moebus.consumers.store.blobs.objects import ObstoreObjects

_FILE = "blobs.id"


def open_objects(
    place: Place, store_id: str, data_dir: Path, timeout: float, endpoint: str | None, sync: bool
) -> ObstoreObjects:
    """Objects below `{store_id}/{id of the data folder}`: two folders never share objects, whatever the stores are
    called.

    Raises:
        SettingsError: the extra is missing, the place is malformed, or the id of the folder cannot be read.
    """
    check_extra()
    from moebus.consumers.store.blobs.objects import ObstoreObjects

    return ObstoreObjects(place, f"{store_id}/{_folder_id(data_dir)}", timeout, endpoint, sync)


def check_extra() -> None:
    """Raises SettingsError where obstore is not installed."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise SettingsError(
            "store.blobs: objects need the extra object-storage: pip install 'moebus[object-storage]'"
        ) from None


def _folder_id(data_dir: Path) -> str:
    path = data_dir / _FILE
    try:
        if not path.exists():
            fresh = path.with_suffix(".new")
            fresh.write_text(secrets.token_hex(8))
            fresh.replace(path)
        text = path.read_text().strip()
    except OSError as error:
        raise SettingsError(f"store.data_dir: {path} cannot be used: {error.strerror}") from None
    if not re.fullmatch(r"[0-9a-f]{16}", text):
        raise SettingsError(f"store.data_dir: {path} holds no id; remove it, and the objects are written again")
    return text
