"""Lets kafka-python 3.0 read records whose header names are not UTF-8.

Without this, one such record in a partition makes every `poll` fail for ever, and its neighbours in the batch are lost
with it. Kafka itself does not check the names, so anyone who may write to a topic could stop its readers.
"""

from __future__ import annotations

import threading
from typing import Any

from kafka.record.default_records import DefaultRecordBatch

_lock = threading.Lock()
_installed = False


class _Bytes(bytearray):
    """Bytes that decode with U+FFFD in place of what is not UTF-8, and whose slices do the same."""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return _Bytes(found) if isinstance(key, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, "replace")


def install() -> None:
    """Once a process; changes nothing for records that could be read before."""
    global _installed
    with _lock:
        if _installed:
            return
        strict = DefaultRecordBatch._read_msg

        def read_msg(batch: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return strict(batch, *args, **kwargs)
            except UnicodeDecodeError:
                # The position is moved last, so the same record can be read again; the rest of the batch, too,
                # is then read from the lenient copy.
                batch._buffer = _Bytes(batch._buffer)
                return strict(batch, *args, **kwargs)

        DefaultRecordBatch._read_msg = read_msg
        _installed = True
