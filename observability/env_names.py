"""Which environment variables are settings, and the nearest name for those that are not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

# Set by Kubernetes for a service called `moebus`, or meant for the command itself.
_FOREIGN = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT.*|_PORT|_PORT_\d+_(TCP|UDP).*)$")
_COMMAND = {"CONFIG", "HOME"}


def setting_names(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Every environment variable that sets something in `model`, upper case."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}".upper()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from setting_names(info.annotation, f"{prefix}{name}__")


def unknown_names(environ: Mapping[str, str | None], model: type[BaseModel], prefix: str) -> dict[str, str]:
    """Variables that begin with `prefix` and set nothing -> a hint (`; did you mean X?` or empty)."""
    known = {*setting_names(model, prefix), *(prefix + name for name in _COMMAND)}
    found: dict[str, str] = {}
    for raw in environ:
        name = raw.upper()
        if not name.startswith(prefix) or name in known:
            continue
        if _FOREIGN.search(name) and "__" not in name:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        found[name] = f"; did you mean {near[0]}?" if near else ""
    return found
