"""Where a trainer hands weights to simulated engines: a folder, as NCCL is to real ones.

An engine stays in `update` until the trainer has sent every tensor; the trainer may wait until all engines are there,
so engines that wait in line for each other never get anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

import xxhash

from moebus.engine.port import Deadline, EngineRefused, EngineTimeout

_POLL_S = 0.01
MAX_TENSORS = 1_000_000


class Rendezvous:
    """One transfer in one folder. Tensors are files that appear whole; who has arrived is a file too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    # -- the trainer's side

    def arrived(self) -> frozenset[str]:
        """Identities of the engines that are in `update`, or were."""
        return frozenset(file.name.removeprefix("engine-") for file in self._folder.glob("engine-*"))

    def wait_arrived(self, engines: int, deadline: Deadline) -> None:
        """Blocks until `engines` engines are there. Raises EngineTimeout."""
        if not _wait(lambda: len(self.arrived()) >= engines, deadline):
            raise EngineTimeout(f"{len(self.arrived())} of {engines} engines were there at the deadline")

    def send(self, name: str, value: bytes) -> None:
        """Gives one tensor to every engine."""
        draft = self._folder / f".{quote(name, safe='')}"
        draft.write_bytes(value)
        os.replace(draft, self._tensor(name))

    # -- the engine's side

    def arrive(self, identity: str) -> None:
        (self._folder / f"engine-{identity}").touch()

    def receive(self, name: str, deadline: Deadline) -> str:
        """Blocks until the tensor is there; XXH3-128 hex of its value. Raises EngineTimeout."""
        file = self._tensor(name)
        if not _wait(file.exists, deadline):
            raise EngineTimeout(f"tensor {name!r} had not come at the deadline")
        return xxhash.xxh3_128_hexdigest(file.read_bytes())

    def _tensor(self, name: str) -> Path:
        return self._folder / f"tensor-{quote(name, safe='')}"


def tensor_names(info: Mapping[str, object]) -> list[str]:
    """`tensors` of a transfer's info.

    Raises:
        EngineRefused: not a list of names.
    """
    names = info.get("tensors", [])
    if not isinstance(names, list) or len(names) > MAX_TENSORS or not all(isinstance(name, str) for name in names):
        raise EngineRefused("info: `tensors` is not a list of tensor names")
    return names


def _wait(done: Callable[[], bool], deadline: Deadline) -> bool:
    while not done():
        left = deadline.remaining()
        if left <= 0:
            return False
        time.sleep(min(left, _POLL_S))
    return True
