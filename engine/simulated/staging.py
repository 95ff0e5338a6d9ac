"""What a simulated engine does before a commit, by how far an engine can stage (design section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

from moebus.engine.port import Deadline, EngineFailed, EngineRefused, Staged, StageKind
from moebus.engine.simulated.memory import Committed, SimulatedMemory
from moebus.engine.waiting import Never


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """The handle of something staged. `digest`: that was asked for."""

    digest: str | None


class Staging:
    """`loaded`: the new weights are held ready. `validated`: the files were checked and are read again by the commit.
    `none`: nothing is looked at before the commit."""

    def __init__(self, kind: StageKind, memory: SimulatedMemory) -> None:
        self.kind = kind
        self._memory = memory
        self._held: set[object] = set()

    def stage(self, version: str, source: str | None, digest: str | None, deadline: Deadline) -> Staged:
        """Raises EngineRefused as the port says."""
        found = None
        if self.kind != "none":
            found = self._memory.digest_of(source, deadline)
            if digest is not None and digest.lower() != found:
                raise EngineRefused(f"digest: {digest!r} was asked for, the weights have {found!r}")
        handle = _Wanted(digest)
        self._held.add(handle)
        return Staged(version, self.kind, found, source, handle)

    def ready(self, staged: Staged) -> Committed:
        """What a commit of `staged` makes current; not without lock, as it may read files.

        Raises:
            EngineFailed: not staged here, or what is read now is not what was checked.
        """
        if staged.handle not in self._held or not isinstance(staged.handle, _Wanted):
            raise EngineFailed(f"commit: version {staged.version!r} is not staged here; stage it again")
        if self.kind == "loaded":
            return Committed(staged.version, staged.source, staged.weights_digest)
        wanted = staged.weights_digest or staged.handle.digest
        try:
            found = self._memory.digest_of(staged.source, Never())
        except EngineRefused as error:
            raise EngineFailed(f"commit: version {staged.version!r} was not written; {error}") from error
        if wanted is not None and wanted.lower() != found:
            raise EngineFailed(
                f"commit: version {staged.version!r} was not written; the weights have digest {found!r}, not {wanted!r}"
            )
        return Committed(staged.version, staged.source, found)

    def drop(self, staged: Staged) -> None:
        self._held.discard(staged.handle)

    def clear(self) -> None:
        self._held.clear()
