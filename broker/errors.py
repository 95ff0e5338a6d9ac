"""Errors of the log. Client exceptions never leave this package; these do."""

from __future__ import annotations

from typing import ClassVar

from moebus.schemas.errors import FatalError, RetriableError


class BrokerUnavailable(RetriableError):
    """No broker answered within the time allowed; the text has the address and the reason the client gave."""

    exit_code: ClassVar[int] = 5


class AppendFailed(FatalError):
    """The log refused this record for good (too large, null key on a compacted topic, not authorised)."""


class AppendUnknown(RetriableError):
    """The receipt's deadline passed or the writer closed first: the record may or may not be in the log."""


class RecordTooLarge(AppendFailed):
    """The record is above the limit; raised before anything is sent."""


class WriterClosed(FatalError):
    """The writer was closed before this call."""


class OffsetOutOfRange(FatalError):
    """The log no longer (or does not yet) hold the offset asked for; nothing was skipped."""

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        super().__init__(
            f"{topic}/{partition} has no offset {offset}: it was deleted by retention or the log was recreated"
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset


class TopicMissing(FatalError):
    """A topic does not exist; `moebus topics ensure` creates it."""


class AdminRefused(FatalError):
    """The cluster answered a request of the admin port and refused it: not allowed, or a setting it does not know."""


class PartitionLost(RetriableError):
    """A commit named a partition that this group member no longer owns; nothing was committed."""
