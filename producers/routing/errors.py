"""Why a submission was not stored, besides what the log says."""

from __future__ import annotations

from moebus.schemas.errors import FatalError, RetriableError


class RoutesDropped(RetriableError):
    """The publisher's buffer was full (bounded by bytes) and stayed so; nothing of this rollout was sent."""


class PublisherSuspended(FatalError):
    """The publisher is suspended; nothing of this rollout was sent, on purpose."""


class NotSampled(FatalError):
    """The rollout's group is not in the share that is sent (`publisher.sample`); nothing of it was sent, on purpose."""


class PublisherClosed(FatalError):
    """The publisher was closed before this call."""
