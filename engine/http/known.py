"""A belief of one server, kept over its life: read from the notes at first, given up with the life it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moebus.engine.http.belief import Belief
from moebus.engine.http.identity import Lives
from moebus.engine.http.notes import Notes
from moebus.engine.port import EngineFailed


class Open:
    """What was staged and neither committed nor discarded: a server keeps nothing, so the adapter counts."""

    def __init__(self) -> None:
        self._kept: dict[object, object] = {}

    def add(self, kept: object = None) -> object:
        """The handle of a new one."""
        handle = object()
        self._kept[handle] = kept
        return handle

    def get(self, handle: object) -> object:
        """What was kept under it. Raises EngineFailed: it is not open."""
        if handle not in self._kept:
            raise EngineFailed("commit: nothing is staged under this handle; stage again")
        return self._kept[handle]

    def drop(self, handle: object) -> None:
        self._kept.pop(handle, None)


class Known:
    """`belief` is replaced whole: other threads read it. `busy`: a call of ours may keep the server from answering."""

    def __init__(self, lives: Lives, notes: Notes, *, keeps: Callable[[Belief, str], Belief] | None = None) -> None:
        """`keeps(old, life)`: what is known of a new life (default: first weights, all awake)."""
        self._lives = lives
        self._notes = notes
        self._keeps = keeps or (lambda old, life: Belief(life=life))
        self.belief = Belief()
        self.busy = False

    def identity(self) -> str:
        return self._lives.current()

    def now(self) -> Belief:
        """The belief of the server's present life. Raises EngineUnreachable: the server has never answered."""
        life = self._lives.current()
        if self.belief.life != life:
            noted = self._notes.read() if not self.belief.life else None
            same = noted is not None and noted.life == life
            self.belief = noted if same and noted is not None else self._keeps(noted or self.belief, life)
        return self.belief

    def sure(self, doing: str) -> Belief:
        """As `now`. Raises EngineFailed: what the server's memory holds is not known."""
        belief = self.now()
        if not belief.sure:
            raise EngineFailed(
                f"{doing}: an answer about the memory was lost and the server does not tell what it holds; restart it"
            )
        return belief

    def set(self, belief: Belief) -> None:
        self.belief = belief
        self._notes.write(belief)

    @contextmanager
    def calling(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
