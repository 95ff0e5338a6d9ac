"""The few lines of vLLM's metrics that the adapter reads."""

from __future__ import annotations

import pytest

from moebus.engine.vllm.metrics import Gauges, read_gauges

TEXT = """# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76445432193e+09
vllm:num_requests_running{engine="0",model_name="a b{c}\\"d"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0
vllm:num_requests_running_by_lora{x="1"} 7.0
"""


def test_what_a_server_says() -> None:
    assert read_gauges(TEXT) == Gauges("1.76445432193e+09", False, "offload", 6, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Gauges()),
        ("<html>", Gauges()),
        ("process_start_time_seconds", Gauges()),
        ("process_start_time_seconds nan", Gauges()),
        ("vllm:num_requests_running{", Gauges()),
        ("vllm:num_requests_running NaN\nvllm:num_requests_running +Inf", Gauges()),
        ("vllm:num_requests_running x", Gauges()),
        ('vllm:engine_sleep_state{sleep_state="awake"} 1', Gauges(awake=True)),
        ('vllm:engine_sleep_state{sleep_state="discard_all"} 1', Gauges(awake=False, asleep="discard")),
        ('vllm:engine_sleep_state{sleep_state="awake"} x', Gauges()),
    ],
)
def test_odd_texts(text: str, expected: Gauges) -> None:
    assert read_gauges(text) == expected
