"""What `moebus doctor` is made of: findings, and checks that end in their time whatever they look at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from moebus.schemas.errors import MoebusError

Status = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix`: what to do, empty where there is nothing to do."""

    check: str
    status: Status
    message: str
    fix: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Check:
    """`run` is given up after `seconds`; `needs`: a check that has to have found no problem before."""

    name: str
    seconds: float
    run: Callable[[], list[Finding]]
    needs: str = ""


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Runs `checks` in order; what one of them raises is a finding."""
    bad: set[str] = set()
    for check in checks:
        if check.needs in bad:
            bad.add(check.name)
            yield Finding(check.name, "skipped", f"not looked at: {check.needs} comes first")
            continue
        for finding in _in_time(check):
            if finding.status == "problem":
                bad.add(check.name)
            yield finding


def _in_time(check: Check) -> list[Finding]:
    """On a thread of its own, which is left behind where it hangs."""
    found: list[list[Finding]] = []

    def run() -> None:
        try:
            found.append(check.run())
        except MoebusError as error:
            found.append([Finding(check.name, "problem", str(error))])
        except Exception as error:  # whatever a broken installation raises is what is looked for
            found.append([Finding(check.name, "problem", f"{type(error).__name__}: {error}")])

    thread = threading.Thread(target=run, name=f"moebus-doctor-{check.name}", daemon=True)
    thread.start()
    thread.join(check.seconds)
    return found[0] if found else [Finding(check.name, "problem", f"no answer within {check.seconds:g} s")]
