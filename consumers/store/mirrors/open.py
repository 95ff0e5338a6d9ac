"""Mirrors as settings name them: `p2pstore:redis://host:port` and `folder:/path`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from moebus.consumers.store.changes import Changes
from moebus.consumers.store.mirrors.folder import FolderTarget, check_folder
from moebus.consumers.store.mirrors.ledger import Ledger
from moebus.consumers.store.mirrors.mirror import Mirror
from moebus.consumers.store.mirrors.p2pstore import P2PTarget, check_url
from moebus.consumers.store.mirrors.port import Target
from moebus.consumers.store.mirrors.source import Wanted
from moebus.consumers.store.partition import Partition
from moebus.consumers.store.progress import Progress
from moebus.observability.metrics import Metrics
from moebus.observability.settings import MirrorSettings
from moebus.schemas.errors import SettingsError
from moebus.schemas.rollout import check_run


def check_mirrors(specs: Sequence[str], settings: MirrorSettings) -> None:
    """Raises SettingsError, naming the setting, for what cannot be a mirror."""
    for spec in specs:
        kind, rest = _split(spec)
        if kind == "folder":
            check_folder(Path(rest))
        else:
            check_url(rest)
    if len({_split(spec) for spec in specs}) < len(specs):
        raise SettingsError("store.mirrors: one of them is named twice")
    if specs and settings.max_model_len is None:
        raise SettingsError(
            "store.mirror.max_model_len: a mirror needs it, as FastDeploy pads to it; 0 leaves arrays as they are"
        )
    if settings.run is not None:
        check_run(settings.run)


class Mirrors:
    """All mirrors of a store. `start` their threads; `changed` and `look_again` never block."""

    def __init__(self, run: str, mirrors: Sequence[Mirror]) -> None:
        self._run = run
        self._mirrors = mirrors
        self._threads = [
            threading.Thread(target=mirror.run, name="moebus-store-mirror", daemon=True) for mirror in mirrors
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def changed(self, changes: Changes) -> None:
        """After a commit."""
        ids = [key.rollout_id for key in changes.keys if key.run == self._run and not key.choice]
        for mirror in self._mirrors:
            mirror.changed(ids)
            if changes.many:
                mirror.inbox.look_again()

    def look_again(self) -> None:
        """A partition was rebuilt."""
        for mirror in self._mirrors:
            mirror.inbox.look_again()

    def join(self, timeout: float) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout)


def open_mirrors(
    specs: Sequence[str], settings: MirrorSettings, run: str, store_id: str, data_dir: Path,
    partitions: Mapping[int, Partition], progress: Progress, metrics: Metrics, stopping: threading.Event,
) -> Mirrors:  # fmt: skip
    """Raises SettingsError where a target or its ledger cannot be used."""
    wanted = Wanted(partitions, progress, settings.run or run)
    made: list[Mirror] = []
    for spec in specs:
        target = _target(spec, settings, store_id)
        name = hashlib.sha256(f"{target.where} {wanted.run}".encode()).hexdigest()[:16]
        ledger = Ledger(data_dir / "mirrors" / f"{name}.sqlite", target.forgets)
        made.append(Mirror(target, ledger, wanted, settings, metrics, stopping))
    return Mirrors(wanted.run, made)


def _target(spec: str, settings: MirrorSettings, store_id: str) -> Target:
    kind, rest = _split(spec)
    return FolderTarget(Path(rest), store_id) if kind == "folder" else P2PTarget(rest, settings)


def _split(spec: str) -> tuple[str, str]:
    kind, _, rest = spec.partition(":")
    if kind not in ("folder", "p2pstore") or not rest:
        raise SettingsError(
            f"store.mirrors: {spec.rpartition('@')[2]!r} is unknown; known are folder:/path and "
            "p2pstore:redis://host:port"
        )
    return kind, rest
