"""Makes the publisher's process end itself at one rollout, called `poison`: when its entry is read, or in the middle of
its records."""

from __future__ import annotations

import pytest

from moebus.producers.routing.process import spawn

_RUN = "from moebus.producers.routing.process.program import main"
_POISON = """
from moebus.producers.routing.process import child
import os
read = child.read_parcel
def read_parcel(meta, data, created_ms):
    if b'"poison' in meta and WHEN == "read":
        os.abort()
    return read(meta, data, created_ms)
child.read_parcel = read_parcel
make = child.rollout_job
def rollout_job(parcel, *rest):
    job = make(parcel, *rest)
    records = job.open
    def poisoned():
        for number, record in enumerate(records()):
            if parcel.header.rollout_id == "poison" and number == 1 and WHEN == "encode":
                os.abort()
            yield record
    job.open = poisoned
    return job
child.rollout_job = rollout_job
"""


def poison(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """`when`: read or encode. For every child that starts from now on."""
    assert _RUN in spawn.BOOT
    monkeypatch.setattr(spawn, "BOOT", spawn.BOOT.replace(_RUN, f"WHEN = {when!r}\n{_POISON}\n{_RUN}"))
