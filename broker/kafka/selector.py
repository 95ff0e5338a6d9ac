"""A selector that does not describe a socket in words to say that it is not registered.

kafka-python asks for a socket's key before each registration, which is before each wait. The standard library's answer
for an unknown one is an error whose text has the socket's addresses, two system calls each time: a quarter of the time
of a producer's thread with small records.
"""

from __future__ import annotations

import selectors
from typing import Any


class QuickSelector(selectors.DefaultSelector):
    """As the platform's selector; `get_key` of what is not registered raises a plain KeyError."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self._known[key.fd] = key
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        try:
            key = super().modify(fileobj, events, data)
        except Exception:  # the platform's selector may have forgotten it
            self._known = {key.fd: key for key in self.get_map().values()}
            raise
        self._known[key.fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = super().unregister(fileobj)
        self._known.pop(key.fd, None)
        return key

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        """The key of a registered file. Raises KeyError."""
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        return super().get_key(fileobj) if number < 0 else self._known[number]  # below 0: it was closed

    def close(self) -> None:
        self._known.clear()
        super().close()
