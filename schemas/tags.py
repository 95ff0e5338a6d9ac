"""Memory tags of an engine (`weight`, `kv_cache`) and the one way to read them from outside."""

from __future__ import annotations

from enum import Enum

from moebus.schemas.errors import InvalidInput


class Tag(str, Enum):
    """A part of an engine's device memory that sleeps and wakes on its own."""

    WEIGHT = "weight"
    KV_CACHE = "kv_cache"

    def __str__(self) -> str:
        return self.value


ALL_TAGS: tuple[Tag, ...] = (Tag.WEIGHT, Tag.KV_CACHE)
_ALIASES = {"weights": Tag.WEIGHT}  # vLLM's and SGLang's word


def parse_tags(value: object, *, aliases: bool = True) -> tuple[Tag, ...]:
    """Tags in canonical order (weight, kv_cache), each once. None means both.

    `value`: None, a comma-separated string or a list of strings; blanks around a name are ignored.
    `aliases=False` refuses `weights`, as FastDeploy's own paths do.

    Raises:
        InvalidInput: field `tags`; empty, unknown, or not a string or a list of strings.
    """
    if value is None:
        return ALL_TAGS
    if isinstance(value, str):
        names: list[object] = list(value.split(","))
    elif isinstance(value, (list, tuple)):
        names = list(value)
    else:
        raise InvalidInput("tags", f"a string or a list of strings is needed, not {type(value).__name__}")
    found = {_one(name, aliases) for name in names}
    if not found:
        raise InvalidInput("tags", "empty; leave it out to mean both")
    return tuple(tag for tag in ALL_TAGS if tag in found)


def _one(name: object, aliases: bool) -> Tag:
    if not isinstance(name, str):
        raise InvalidInput("tags", f"a tag is a string, not {type(name).__name__}")
    text = name.strip()
    if aliases and text in _ALIASES:
        return _ALIASES[text]
    try:
        return Tag(text)
    except ValueError:
        raise InvalidInput("tags", f"unknown tag {text!r}; known are weight and kv_cache") from None
