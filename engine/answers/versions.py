"""Weight versions of output tokens as weight versions of rows.

Row i is the forward pass of token i, and the pass of the token before samples an output token: with a prompt of P
tokens, output token i (from 0) was sampled by row P - 1 + i, under the version that computed that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moebus.engine.answers import fields
from moebus.schemas.errors import InvalidInput

MAX_VERSION = 255
"""Bytes of UTF-8, as the record has room for."""


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens [start, stop) were sampled under `version`."""

    version: str
    start: int
    stop: int


def read_spans(value: object, path: str) -> list[Span]:
    """`[{version, start, end}, ...]`, as SGLang's `meta_info.weight_versions` has them; empty ones are left out.

    Raises:
        InvalidInput: a field that is missing or malformed, or spans that do not follow each other from 0.
    """
    spans: list[Span] = []
    for index, entry in enumerate(fields.items(value, path)):
        where = fields.at(path, index)
        one = fields.mapping(entry, where)
        version, start, stop = one.get("version"), fields.count(one, "start", where), fields.count(one, "end", where)
        if start is None or stop is None:
            raise InvalidInput(where, "start and end are needed")
        last = spans[-1].stop if spans else 0
        if start != last or stop < start:
            raise InvalidInput(where, f"tokens [{start}, {stop}) do not follow those before, which end at {last}")
        if stop > start:
            spans.append(Span(read_version(version, fields.join(where, "version")), start, stop))
    return spans


def read_version(value: object, path: str) -> str:
    """A version as text; servers also send numbers. Raises InvalidInput (field `path`)."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if abs(value) < 2**63 else None
    if not isinstance(value, str) or not value or len(value.encode("utf-8", "replace")) > MAX_VERSION:
        raise InvalidInput(path, f"text of 1 to {MAX_VERSION} bytes is needed")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidInput(path, "not valid UTF-8") from None
    return value


def row_spans(
    spans: Sequence[Span], prompt: int, output: int, start: int, path: str = "weight_versions"
) -> tuple[tuple[int, str], ...]:
    """((first row, version), ...), absolute rows, the first one at `start`; empty without spans.

    Rows of the prompt before the one that sampled the first token count to its version: they were computed by the same
    request (rows out of a prefix cache may be older; no server says so).

    Raises:
        InvalidInput: field `path`, where the spans are not of `output` tokens.
    """
    if spans and spans[-1].stop != output:
        raise InvalidInput(path, f"of {spans[-1].stop} tokens where there are {output} output tokens")
    found: list[tuple[int, str]] = []
    for span in spans:
        row = max(prompt - 1 + span.start if span.start else start, start)
        if found and found[-1][0] == row:
            found.pop()
        if not found or found[-1][1] != span.version:
            found.append((row, span.version))
    return tuple(found)
