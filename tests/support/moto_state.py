"""A hand inside moto's server, which runs in this process: a bucket that goes away and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moto.core.base_backend import BackendDict
from moto.s3.models import s3_backends


def objects_of(name: str) -> list[str]:
    """Names of all objects in a bucket."""
    return sorted(str(key) for key in s3_backends["123456789012"]["aws"].buckets[name].keys)


@contextmanager
def hidden_bucket(name: str) -> Iterator[None]:
    """Requests to it are answered NoSuchBucket."""
    assert isinstance(s3_backends, BackendDict)
    buckets = s3_backends["123456789012"]["aws"].buckets
    taken = buckets.pop(name)
    try:
        yield
    finally:
        buckets[name] = taken
