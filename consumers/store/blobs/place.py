"""Where blobs lie, as a setting says it: `lmdb`, `file:///path` or `s3://bucket/prefix`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from moebus.schemas.errors import SettingsError

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_FIELD = "store.blobs"
_KNOWN = "known are lmdb, file:///path and s3://bucket/prefix"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder (`path`), or a bucket and a prefix in it."""

    path: Path | None = None
    bucket: str = ""
    prefix: str = ""

    def __str__(self) -> str:
        if self.path is not None:
            return f"file://{self.path}"
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def read_place(text: str) -> Place | None:
    """None for `lmdb`.

    Raises:
        SettingsError: naming the setting and what is wrong with it.
    """
    if text == "lmdb":
        return None
    try:
        url = urlsplit(text)
        strange = url.query or url.fragment or url.username or url.password or url.port
    except ValueError as error:
        raise SettingsError(f"{_FIELD}: {text!r} is no URL: {error}") from None
    if url.username or url.password:
        raise SettingsError(f"{_FIELD}: credentials do not belong in the URL; set AWS_ACCESS_KEY_ID and the like")
    if strange:
        raise SettingsError(f"{_FIELD}: {text!r}: a port, a query or a fragment has no meaning here; {_KNOWN}")
    if url.scheme == "file":
        return _folder(text, url.netloc, unquote(url.path))
    if url.scheme == "s3":
        return _bucket(text, url.netloc, unquote(url.path).strip("/"))
    raise SettingsError(f"{_FIELD}: {text!r} is unknown; {_KNOWN}")


def check_endpoint(text: str | None) -> str | None:
    """The URL itself. Raises SettingsError unless it is http(s) with a host."""
    if text is None:
        return None
    try:
        url = urlsplit(text)
        good = url.scheme in ("http", "https") and url.hostname and not url.username and (url.port is None or url.port)
    except ValueError:
        good = False
    if not good:
        raise SettingsError(f"store.blobs_endpoint: {text!r} is not like https://host:port")
    return text.rstrip("/")


def _folder(text: str, host: str, path: str) -> Place:
    if host not in ("", "localhost") or not path.startswith("/") or path.strip("/") == "":
        raise SettingsError(f"{_FIELD}: {text!r} needs an absolute path, like file:///var/lib/moebus-blobs")
    if ".." in path.split("/") or "\0" in path:
        raise SettingsError(f"{_FIELD}: {text!r}: '..' is not allowed in the path")
    return Place(path=Path(path))


def _bucket(text: str, bucket: str, prefix: str) -> Place:
    if not _BUCKET.fullmatch(bucket):
        raise SettingsError(f"{_FIELD}: {text!r}: {bucket!r} is not the name of a bucket")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise SettingsError(f"{_FIELD}: {text!r}: the prefix has an empty part, '.' or '..'")
    return Place(bucket=bucket, prefix=prefix)
