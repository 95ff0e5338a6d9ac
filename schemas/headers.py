"""Record headers: names, building and tolerant reading (design section 2)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

CONTENT_TYPE = "content-type"
CONTENT_ENCODING = "content-encoding"
SCHEMA_VERSION = "schema-version"
CORRELATION_ID = "correlation-id"
TRACEPARENT = "traceparent"
PRODUCER_ID = "producer-id"

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
ZSTD = "zstd"

HeaderList = list[tuple[str, "bytes | None"]]
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class HeaderView:
    """What the headers of a record say; None where a header is absent, null, not UTF-8 or malformed."""

    content_type: str | None = None
    content_encoding: str | None = None
    schema_version: int | None = None
    correlation_id: str | None = None
    traceparent: str | None = None
    producer_id: str | None = None


def build_headers(
    *,
    correlation_id: str,
    producer_id: str,
    traceparent: str | None = None,
    content_type: str = JSON_TYPE,
    content_encoding: str | None = None,
    schema_version: int = 1,
) -> HeaderList:
    """Headers of a new record. A well-formed `traceparent` of the caller is kept; else one is derived from the
    correlation id, so that all records of one request share a trace."""
    headers: HeaderList = [
        (CONTENT_TYPE, content_type.encode()),
        (SCHEMA_VERSION, str(schema_version).encode()),
        (CORRELATION_ID, correlation_id.encode("utf-8", "replace")),
        (TRACEPARENT, keep_or_derive(traceparent, correlation_id, producer_id).encode()),
        (PRODUCER_ID, producer_id.encode("utf-8", "replace")),
    ]
    if content_encoding is not None:
        headers.append((CONTENT_ENCODING, content_encoding.encode()))
    return headers


def read_headers(headers: Iterable[tuple[str, bytes | None]]) -> HeaderView:
    """Never raises: unknown names are ignored, of repeated names the last readable value counts."""
    found: dict[str, str] = {}
    for name, value in headers:
        if value is None:
            continue
        try:
            found[name.lower()] = value.decode("utf-8")
        except UnicodeDecodeError:
            continue
    version = found.get(SCHEMA_VERSION, "")
    trace = found.get(TRACEPARENT, "")
    encoding = found.get(CONTENT_ENCODING)
    return HeaderView(
        content_type=found.get(CONTENT_TYPE),
        content_encoding=encoding.strip().lower() if encoding is not None else None,
        schema_version=int(version) if version.isascii() and version.isdigit() and len(version) < 10 else None,
        correlation_id=found.get(CORRELATION_ID),
        traceparent=trace if is_traceparent(trace) else None,
        producer_id=found.get(PRODUCER_ID),
    )


def is_traceparent(text: str) -> bool:
    """Whether `text` is a W3C trace context parent with non-zero ids."""
    return _TRACEPARENT.fullmatch(text) is not None and not text.startswith("ff")


def keep_or_derive(traceparent: str | None, correlation_id: str, producer_id: str) -> str:
    """`traceparent` where it is well-formed, else one whose trace id every process derives alike."""
    if traceparent is not None and is_traceparent(traceparent):
        return traceparent
    trace = hashlib.sha256(correlation_id.encode("utf-8", "replace")).hexdigest()[:32]
    span = hashlib.sha256(f"{correlation_id}\n{producer_id}".encode("utf-8", "replace")).hexdigest()[:16]
    return f"00-{trace}-{span}-01"
