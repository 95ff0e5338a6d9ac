"""Attempt ids: ULIDs (48 bits of milliseconds, 80 random bits), 16 bytes on the wire, 26 characters as text."""

from __future__ import annotations

import base64
import re

from moebus.schemas.errors import InvalidInput

ATTEMPT_BYTES = 16
_CROCKFORD = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RFC4648 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_TO_TEXT = bytes.maketrans(_RFC4648, _CROCKFORD)
_FROM_TEXT = bytes.maketrans(_CROCKFORD, _RFC4648)
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")


def new_attempt(now_ms: int, randomness: bytes) -> bytes:
    """A new id from Unix milliseconds and 10 random bytes (`secrets.token_bytes(10)`)."""
    if len(randomness) != 10:
        raise InvalidInput("randomness", f"10 bytes are needed, not {len(randomness)}")
    return now_ms.to_bytes(6, "big") + randomness


def attempt_text(attempt: bytes) -> str:
    """The 26 characters of a 16-byte id."""
    if len(attempt) != ATTEMPT_BYTES:
        raise InvalidInput("attempt", f"16 bytes are needed, not {len(attempt)}")
    # 20 bytes are 32 digits of 5 bits; the first 6 and a bit are those of the padding
    return base64.b32encode(bytes(4) + attempt)[6:].translate(_TO_TEXT).decode()


def parse_attempt(text: str) -> bytes:
    """The 16 bytes of a ULID's 26 characters (lower case is read too).

    Raises:
        InvalidInput: field `attempt`.
    """
    upper = check_attempt(text).upper()
    return base64.b32decode(b"AAAAAA" + upper.encode().translate(_FROM_TEXT))[4:]


def check_attempt(text: str) -> str:
    """`text` itself. Raises InvalidInput, field `attempt`, unless it is a ULID's 26 characters."""
    if not isinstance(text, str) or not _ULID.fullmatch(text.upper()):
        raise InvalidInput("attempt", f"{str(text)[:40]!r} is not a ULID of 26 characters")
    return text
