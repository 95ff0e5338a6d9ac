"""The few lines of vLLM's `/metrics` that say what no call says."""

from __future__ import annotations

from dataclasses import dataclass

from moebus.engine.port import Level

_START = "process_start_time_seconds"
_SLEEP = "vllm:engine_sleep_state"
_RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_LEVELS: dict[str, Level] = {"weights_offloaded": "offload", "discard_all": "discard"}


@dataclass(frozen=True, slots=True)
class Gauges:
    """`started`: start of the API server process, as printed; None with several of them. `asleep`: level of the last
    sleep that no wake has followed, of any tag. `requests`: running and waiting, `running`: alone, both as of the last
    step: stale while paused. None where not told."""

    started: str | None = None
    awake: bool | None = None
    asleep: Level | None = None
    requests: int | None = None
    running: int | None = None


def read_gauges(text: str) -> Gauges:
    """From the Prometheus text format; lines that are not of interest or malformed are skipped."""
    started: str | None = None
    states: dict[str, float] = {}
    requests: int | None = None
    running: int | None = None
    for line in text.splitlines():
        if line.startswith("#") or not line.startswith(("process_", "vllm:")):
            continue
        name, labels, value = _split(line)
        if name == _START and value is not None:
            started = line.split()[-1]
        elif name == _SLEEP and value is not None:
            state = _label(labels, "sleep_state")
            states[state] = max(value, states.get(state, 0.0))  # one series per engine of the server
        elif name in _RUNNING and value is not None:
            requests = (requests or 0) + int(value)
            if name == _RUNNING[0]:
                running = (running or 0) + int(value)
    asleep = next((level for state, level in _LEVELS.items() if states.get(state, 0) > 0), None)
    awake = None if not states else asleep is None
    return Gauges(started, awake, asleep, requests, running)


def _split(line: str) -> tuple[str, str, float | None]:
    name, brace, rest = line.partition("{")
    if not brace:
        name, _, value = line.partition(" ")
        return name, "", _number(value)
    labels, _, value = rest.rpartition("}")
    return name, labels, _number(value)


def _number(text: str) -> float | None:
    try:
        value = float(text.split()[0])
    except (ValueError, IndexError):
        return None
    return value if value == value and abs(value) < 1e18 else None


def _label(labels: str, name: str) -> str:
    _, found, rest = labels.partition(f'{name}="')
    return rest.partition('"')[0] if found else ""
