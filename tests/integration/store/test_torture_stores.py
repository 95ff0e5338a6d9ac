"""The ordering torture on real stores and readers, in small; `make soak` runs it for minutes."""

from __future__ import annotations

from pathlib import Path

from tests.support.torture import Plan, Torture


def test_stores_equal_the_model_and_readers_saw_only_whole_ones(tmp_path: Path) -> None:
    torture = Torture(Plan(seed=7, seconds=2.0, minutes=2.0, pace=1.0, quota=3_000, sync=False), tmp_path)
    torture.run()
    counts = torture.report.counts
    assert min(counts["records"], counts["get"], counts["resolve"], counts["streamed"], counts["listed"]) > 0
    assert min(counts["whole at the end"], counts["ended by quota"]) > 0
