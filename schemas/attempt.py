"""Attempt ids: ULIDs (48 bits of milliseconds, 80 random bits), 16 bytes on the wire, 26 characters as text."""

from __future__ import annotations

from moebus.schemas.errors import InvalidInput

ATTEMPT_BYTES = 16
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32
_VALUES = {char: value for value, char in enumerate(_ALPHABET)}


def new_attempt(now_ms: int, randomness: bytes) -> bytes:
    """A new id from Unix milliseconds and 10 random bytes (`secrets.token_bytes(10)`)."""
    if len(randomness) != 10:
        raise InvalidInput("randomness", f"10 bytes are needed, not {len(randomness)}")
    return now_ms.to_bytes(6, "big") + randomness


def attempt_text(attempt: bytes) -> str:
    """The 26 characters of a 16-byte id."""
    if len(attempt) != ATTEMPT_BYTES:
        raise InvalidInput("attempt", f"16 bytes are needed, not {len(attempt)}")
    number = int.from_bytes(attempt, "big")
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def parse_attempt(text: str) -> bytes:
    """The 16 bytes of a ULID's 26 characters (lower case is read too).

    Raises:
        InvalidInput: field `attempt`.
    """
    upper = text.upper() if isinstance(text, str) else ""
    if len(upper) != 26 or any(char not in _VALUES for char in upper) or upper[0] > "7":
        raise InvalidInput("attempt", f"{str(text)[:40]!r} is not a ULID of 26 characters")
    number = 0
    for char in upper:
        number = number << 5 | _VALUES[char]
    return number.to_bytes(ATTEMPT_BYTES, "big")
