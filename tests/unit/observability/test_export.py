from __future__ import annotations

from pathlib import Path

from moebus.observability.export import page


def test_the_page_of_metrics_is_current() -> None:
    assert (Path(__file__).parents[3] / "docs/metrics.md").read_text() == page(), "run `make docs`"
