"""The simulated device memory: two tags, the weights in it, and what they can be restored from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from moebus.engine.port import Deadline, EngineFailed, EngineRefused, Level, Rank, WakeWeights
from moebus.engine.simulated.config import SimulatedConfig
from moebus.engine.sources import local_source, resolve_source
from moebus.schemas.tags import ALL_TAGS, Tag

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Committed:
    """The weights that count. `source` None: the engine's own."""

    version: str
    source: str | None
    digest: str | None


class SimulatedMemory:
    """Not thread-safe; the engine holds its lock around every call but `digest_of`."""

    def __init__(self, config: SimulatedConfig, version: str, allowed_roots: tuple[str, ...], ranks: int = 1) -> None:
        self._config = config
        self._roots = allowed_roots
        self._initial = version
        self._ranks = range(ranks if ranks > 1 else 0)
        self.lagging: set[int] = set()
        self.reboot()

    def reboot(self) -> None:
        """As after a fresh start: all resident, the first weights."""
        self.committed = Committed(self._initial, None, self.digest_of(None))
        self.resident = dict.fromkeys(ALL_TAGS, True)
        self._rank_versions = dict.fromkeys(self._ranks, self._initial)
        self.valid = True
        self.tainted = False
        self.transferring = False
        self._host_copy = False
        self._received: dict[str, str] = {}

    @property
    def version(self) -> str | None:
        whole = self.resident[Tag.WEIGHT] and self.valid and not self.tainted
        return self.committed.version if whole else None

    @property
    def digest(self) -> str | None:
        return None if self.version is None else self.committed.digest

    def size(self, tag: Tag) -> int:
        """Bytes of `tag` when resident."""
        return self._config.weight_bytes if tag is Tag.WEIGHT else self._config.kv_cache_bytes

    def bytes_by_tag(self) -> dict[Tag, int]:
        return {tag: self.size(tag) if held else 0 for tag, held in self.resident.items()}

    def sleep(self, tag: Tag, level: Level) -> int:
        """Bytes freed; 0 when already asleep."""
        if not self.resident[tag]:
            return 0
        self.resident[tag] = False
        if tag is Tag.WEIGHT:
            self._host_copy = level == "offload" and self.valid
        return self.size(tag)

    def wake(self, tag: Tag, weights: WakeWeights, deadline: Deadline) -> int:
        """Bytes allocated; 0 when already resident.

        Raises:
            EngineFailed: nothing to restore the weights from; still as before.  EngineTimeout.
        """
        held = self.resident[tag]
        if tag is Tag.WEIGHT:
            if weights == "restore" and not (held and self.valid):
                self._restore(deadline)
            elif weights == "empty" and not held:
                self.valid = self._host_copy = False
        self.resident[tag] = True
        return 0 if held else self.size(tag)

    def _restore(self, deadline: Deadline) -> None:
        if not self._host_copy:
            try:
                digest = self.digest_of(self.committed.source, deadline)
            except EngineRefused as error:
                raise EngineFailed(f"wakeup: weights cannot be restored from their source; {error}") from error
            if self.committed.digest != digest:
                raise EngineFailed(
                    f"wakeup: weights at {self.committed.source!r} are not those that were committed; update them"
                )
        self.valid = True
        self._host_copy = False

    def digest_of(self, source: str | None, deadline: Deadline | None = None) -> str:
        """XXH3-128 hex over the file (or the directory's files by name); of the seed for the engine's own.

        Raises:
            EngineRefused: as `local_source`, or the file cannot be read.  EngineTimeout.
        """
        state = xxhash.xxh3_128()
        if source is None:
            state.update(f"own/{self._config.seed}".encode())
            return state.hexdigest()
        with local_source(source, self._roots, deadline=deadline) as path:
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            try:
                for file in files:
                    _add_file(state, file)
            except OSError as error:
                raise EngineRefused(f"source: {source!r} cannot be read ({error.strerror})") from error
        return state.hexdigest()

    def ranks(self) -> tuple[Rank, ...]:
        """What each rank holds."""
        known = self.version is not None
        return tuple(Rank(n, version if known else None) for n, version in self._rank_versions.items())

    def _reach_ranks(self) -> None:
        """What was committed comes to every rank but those that lag, this once."""
        reached = set(self._ranks) - self.lagging
        self._rank_versions.update(dict.fromkeys(reached, self.committed.version))
        self.lagging.clear()

    def commit(self, new: Committed) -> None:
        self.committed = new
        self._reach_ranks()
        self.valid, self.tainted, self.transferring, self._host_copy = True, False, False, False

    def allowed(self, folder: str) -> Path:
        """`folder` as a path. Raises EngineRefused as `resolve_source`."""
        return resolve_source(folder, self._roots)

    def transfer_step(self, step: str) -> None:
        """Before the effect of a transfer's step.

        Raises:
            EngineFailed: asleep, or a step without `start`.
        """
        if not self.resident[Tag.WEIGHT]:
            raise EngineFailed("transfer: the weights are asleep; wake them first")
        if step in ("update", "finish") and not self.transferring:
            raise EngineFailed(f"transfer: {step!r} without `start`")
        if step == "start":
            self.transferring, self.valid, self._host_copy = True, False, False
            self._received.clear()

    def received(self, name: str, digest: str) -> None:
        """A tensor has come."""
        self._received[name] = digest

    def finish_transfer(self, version: str | None) -> None:
        """What was received counts. Its digest is XXH3-128 over the tensors' in order of name; None for none."""
        digest = "".join(f"{name}={self._received[name]};" for name in sorted(self._received))
        found = xxhash.xxh3_128_hexdigest(digest.encode()) if digest else None
        self.committed = Committed(version or self.committed.version, None, found)
        self.transferring, self.valid, self.tainted, self._host_copy = False, True, False, False
        self._reach_ranks()

    def taint(self) -> None:
        self.tainted, self.transferring = True, False


def _add_file(state: xxhash.xxh3_128, file: Path) -> None:
    if not file.is_file():
        return
    state.update(file.name.encode() + b"\0")
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            state.update(chunk)
