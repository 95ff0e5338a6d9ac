"""Runs of rows computed under one weight version."""

from __future__ import annotations

from collections.abc import Sequence


def version_spans(row_versions: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """((start_row, version), ...), ascending, neighbours different; empty without rows."""
    spans: list[tuple[int, str]] = []
    for row, version in enumerate(row_versions):
        if not spans or spans[-1][1] != version:
            spans.append((row, version))
    return tuple(spans)


def row_versions(spans: Sequence[tuple[int, str]], rows: int) -> list[str]:
    """The version of each of `rows` rows: what `version_spans` was made of."""
    stops = [*(start for start, _ in spans[1:]), rows]
    return [version for (start, version), stop in zip(spans, stops, strict=True) for _ in range(stop - start)]
