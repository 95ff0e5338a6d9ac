"""Options of an update that only some kinds of engine know."""

from __future__ import annotations

from collections.abc import Mapping

from moebus.engine.port import Unsupported


def check_options(options: Mapping[str, object] | None, kind: str) -> None:
    """For an engine that always checks digests: `verify_checksum` asks for nothing more, anything else is Unsupported.

    `kind`: of the engine, for the message.
    """
    for name in options or {}:
        if name != "verify_checksum":
            raise Unsupported(f"options.{name}: a {kind} engine has no such way to load weights; name a source")
