"""What every adapter of a server is to the command line: an Engine with an address.

Constructor of all of them, which connects to nothing:

    connect(url, *, token: SecretStr | None = None, allowed_roots: Sequence[str] = ()) -> the engine
"""

from __future__ import annotations

from typing import Protocol

from moebus.engine.port import Engine


class ServerEngine(Engine, Protocol):
    """`identity()` raises EngineUnreachable until the server has answered once; afterwards it never raises. Prompts go
    to the server itself, at `url`."""

    @property
    def url(self) -> str: ...

    @property
    def trouble(self) -> str | None:
        """Why the server did not answer the last time; None while it does."""
        ...
