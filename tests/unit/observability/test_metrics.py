from __future__ import annotations

import re

import pytest

from moebus.observability.catalogue import CATALOGUE, names
from moebus.observability.metrics import Metrics


def test_the_typed_names_are_those_of_the_table() -> None:
    assert names() == {metric.name for metric in CATALOGUE}
    assert len(names()) == len(CATALOGUE)


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_names_follow_the_rules_of_prometheus(metric: object) -> None:
    name, kind, labels = metric.name, metric.kind, metric.labels  # type: ignore[attr-defined]
    assert re.fullmatch(r"moebus_[a-z_]+", name)
    assert name.endswith("_total") == (kind == "counter")
    assert kind != "histogram" or name.endswith("_seconds")
    assert not {"worker_id", "request_id", "rollout_id", "run", "key"} & set(labels)


def test_values_are_counted_and_exposed() -> None:
    metrics = Metrics()
    metrics.inc("moebus_control_answers_total", method="pause", code="ok")
    metrics.observe("moebus_store_commit_duration_seconds", 0.02)
    assert metrics.value("moebus_control_answers_total", method="pause", code="ok") == 1
    assert metrics.value("moebus_store_commit_duration_seconds_count") == 1
    assert b'moebus_control_answers_total{code="ok",method="pause"} 1.0' in metrics.text()


def test_two_processes_worth_of_metrics_do_not_share_state() -> None:
    one, two = Metrics(), Metrics()
    one.inc("moebus_worker_heartbeats_total")
    assert two.value("moebus_worker_heartbeats_total") == 0


def test_wrong_labels_are_an_error() -> None:
    with pytest.raises(ValueError, match="abel"):
        Metrics().inc("moebus_dead_letters_total", cause="x")
