"""Where an engine's server is, and the token it wants."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from moebus.schemas.errors import InvalidInput, SettingsError

MAX_TOKEN_BYTES = 16_384


def check_url(url: str) -> str:
    """`url` without a slash at its end.

    Raises:
        InvalidInput: field `engine_url`; not http(s), no host, or with a user, a query or a fragment.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidInput("engine_url", f"{url!r} is not a URL ({error}); say e.g. http://127.0.0.1:8000") from None
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("engine_url", "it names a user; give a token by --engine-token-file")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or any(c.isspace() for c in url):
        raise InvalidInput("engine_url", f"{url!r} is not an http(s) address; say e.g. http://127.0.0.1:8000")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise InvalidInput("engine_url", f"{url!r} has a query or a fragment; leave it out")
    return url.rstrip("/")


def read_token(path: Path) -> SecretStr:
    """The bearer token in a file: its only line.

    Raises:
        SettingsError: naming the file, never what is in it.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"--engine-token-file {path}: {error.strerror}") from None
    try:
        token = raw.decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or len(raw) > MAX_TOKEN_BYTES or not token.isprintable() or " " in token:
        raise SettingsError(f"--engine-token-file {path}: it must hold one line with the token, printable ASCII")
    return SecretStr(token)
