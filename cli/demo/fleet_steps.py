"""The demo's control side: pause, sleep, wake, update and resume the whole fleet, each answer printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moebus.cli._operation import print_outcome
from moebus.cli._output import out
from moebus.producers.control import ControlClient, Outcome

FLEET = "role=rollout"
_TIMEOUT = 60.0


def run_steps(control: ControlClient, version: str, source: Path) -> list[str]:
    """The colocated loop of a training step; returns the request ids in order.

    Raises FleetError as soon as a worker does not do what was asked.
    """
    steps: list[tuple[str, Callable[[], Outcome]]] = [
        ("pause (let running requests finish)", lambda: control.pause(mode="wait", target=FLEET, timeout=_TIMEOUT)),
        ("sleep kv_cache", lambda: control.sleep(tags=["kv_cache"], level="discard", target=FLEET, timeout=_TIMEOUT)),
        ("sleep weight", lambda: control.sleep(tags=["weight"], target=FLEET, timeout=_TIMEOUT)),
        ("wakeup weight, kv_cache", lambda: control.wakeup(target=FLEET, timeout=_TIMEOUT)),
        (
            f"update_weights to {version}",
            lambda: control.update_weights(version, source=source.as_uri(), target=FLEET, timeout=_TIMEOUT),
        ),
        ("resume", lambda: control.resume(target=FLEET, timeout=_TIMEOUT)),
    ]
    ids = []
    for title, step in steps:
        out.print(f"\n  [bold]{title}[/bold]")
        outcome = step()
        print_outcome(outcome)
        ids.append(outcome.request_id)
    return ids
