"""Options of an update that only some kinds of engine know."""

from __future__ import annotations

import pytest

from moebus.engine.port import Unsupported
from moebus.engine.simulated import SimulatedEngine
from tests.support.deadlines import Left


@pytest.mark.parametrize("options", [None, {}, {"verify_checksum": True}, {"verify_checksum": False}])
def test_checksums_are_verified_anyway(options: dict[str, object] | None) -> None:
    assert SimulatedEngine().stage("v2", None, None, Left(), options).version == "v2"


def test_what_it_cannot_follow_is_refused_by_name() -> None:
    engine = SimulatedEngine()
    options: dict[str, object] = {"verify_checksum": True, "rsync_config": {"etcd_server": "e:1"}}
    with pytest.raises(Unsupported, match=r"options\.rsync_config: a simulated engine has no such way to load weights"):
        engine.stage("v2", None, None, Left(), options)
    assert engine.inspect().version == "initial"
