"""What is mended of the client, as far as it can be shown without a broker; the contract suite shows the rest."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from moebus.broker.kafka.mending import fetch_together


def test_no_fetch_leaves_out_the_partition_whose_answer_has_just_come() -> None:
    asked = [{0: "of all partitions"}]
    fetcher = SimpleNamespace(_completed_fetches=deque(["an answer"]), _create_fetch_requests=lambda: asked[0])
    fetch_together(SimpleNamespace(_fetcher=fetcher))
    assert fetcher._create_fetch_requests() == {}, "it would be of the other partitions"
    fetcher._completed_fetches.clear()
    assert fetcher._create_fetch_requests() == asked[0]
