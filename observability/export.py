"""Writes the table of metrics for the docs: `python -m moebus.observability.export docs/metrics.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from moebus.observability.catalogue import CATALOGUE


def page() -> str:
    """The page as Markdown; a test holds the file against it."""
    head = [
        "# Metrics",
        "",
        "Every process serves these at `/metrics`. Made from `observability/catalogue.py` by `make docs`.",
        "",
        "| name | kind | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    rows = [f"| `{m.name}` | {m.kind} | {', '.join(m.labels) or '-'} | {m.meaning} |" for m in CATALOGUE]
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
