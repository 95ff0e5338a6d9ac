"""Levels of content checks: what a store sets aside, and what a reader refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.consumers.reader.rollout import Rollout, check_rollout
from moebus.consumers.store import StoreOptions
from moebus.consumers.store.decide import Rules
from moebus.observability.settings import StoreSettings, load_settings
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import SettingsError
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import (
    CheckLevel,
    End,
    Header,
    Outcome,
    decode,
    encode,
    encode_attempt,
    stored_checksum,
    whole_checksum,
)
from moebus.schemas.rollout import rollout_key
from moebus.schemas.route_errors import RouteCorrupt
from moebus.schemas.route_ref import RouteRef
from tests.support.routes import CARD, Attempt, attempt_id, make_routes
from tests.support.store import SMALL, Rig, error_of, read

ROWS = 80
CONTENT = {
    "good:0:0:0": make_routes(ROWS),
    "zeros:0:0:0": np.zeros((ROWS, 3, 2), np.uint8),
    "same:0:0:0": np.repeat(make_routes(1), ROWS, axis=0),
}
SET_ASIDE: dict[CheckLevel, set[str]] = {
    "off": set(),
    "ids": {"zeros:0:0:0", "shifted:0:0:0"},
    "full": {"zeros:0:0:0", "same:0:0:0", "shifted:0:0:0"},
}
LEVELS: tuple[CheckLevel, ...] = ("off", "ids", "full")


def attempt(rollout_id: str, number: int, routes: RouteArray, said: ModelCard = CARD) -> Attempt:
    """Records of these rows whose END names the card `said`, whatever the rows are."""
    header = Header.of(rollout_key("run", rollout_id), attempt_id(number))
    chunks = list(encode_attempt(routes, header, CARD, Outcome()))[:-1]
    end = list(encode_attempt(routes, header, said, Outcome()))[-1]
    if said is not CARD:  # the checksum of the END is over the chunks that are sent
        record = decode(end)
        assert isinstance(record, End)
        end = encode(replace(record, checksum=whole_checksum(stored_checksum(chunk) for chunk in chunks)))
    return Attempt(header, routes, [*chunks, end])


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_store_sets_aside(tmp_path: Path, level: CheckLevel) -> None:
    rig = Rig(tmp_path)
    for number, (rollout_id, routes) in enumerate(CONTENT.items(), 1):
        rig.put(attempt(rollout_id, number, routes))
    shifted = ModelCard(CARD.num_experts, CARD.top_k, (0, 1, 4))  # layers numbered without the dense one
    rig.put(attempt("shifted:0:0:0", 9, make_routes(ROWS), said=shifted))
    with rig.running(options=replace(SMALL, rules=Rules(checks=level))) as store:
        for rollout_id in (*CONTENT, "shifted:0:0:0"):
            wanted = "RouteCorrupt" if rollout_id in SET_ASIDE[level] else "none"
            assert error_of(store, rollout_id) == wanted, rollout_id
        assert np.array_equal(read(store, "good:0:0:0"), CONTENT["good:0:0:0"])
        letters = rig.broker.cluster.topics[rig.topics.dlt].logs[0].records
        reasons = sorted((dict(letter.headers)["reason"] or b"").decode() for letter in letters)
    wanted_reasons = {"off": [], "ids": ["expert_ids", "other_card"], "full": ["expert_ids"] * 2 + ["other_card"]}
    assert reasons == wanted_reasons[level]
    told = [(dict(letter.headers)["detail"] or b"").decode() for letter in letters]
    assert "one expert twice in the top-k of a token" in told or level == "off"


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_reader_refuses(level: CheckLevel) -> None:
    for rollout_id, routes in CONTENT.items():
        ref = RouteRef("run", rollout_id, 0, "0" * 25 + "1", ROWS)
        rollout = Rollout(ref, routes, CARD.moe_layers, CARD.top_k, CARD.num_experts, "complete")
        if rollout_id in SET_ASIDE[level]:
            with pytest.raises(RouteCorrupt, match=rollout_id):
                check_rollout(rollout, level)
        else:
            assert check_rollout(rollout, level) is rollout
        with pytest.raises(RouteCorrupt, match="shape"):  # looked at in every level
            check_rollout(replace(rollout, routes=routes[:, :2]), level)


def test_the_levels_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StoreOptions.of(StoreSettings()).rules.checks == "ids"
    monkeypatch.setenv("MOEBUS_STORE__CHECKS", "full")
    monkeypatch.setenv("MOEBUS_READER__CHECKS", "off")
    settings = load_settings()
    assert StoreOptions.of(settings.store).rules.checks == "full"
    assert settings.reader.checks == "off"
    monkeypatch.setenv("MOEBUS_READER__CHECKS", "some")
    with pytest.raises(SettingsError, match=r"reader\.checks"):
        load_settings()
