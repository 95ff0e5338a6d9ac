"""One model a run: what does not fit the model card that the run began with is set aside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.consumers.store import Question
from moebus.consumers.store.decide import Rules
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Base, Clear, Delete, End, Outcome, decode, encode
from moebus.schemas.rollout import rollout_key
from moebus.schemas.route_errors import RouteCorrupt
from tests.support.routes import CARD, Attempt, attempt_id, make_attempt
from tests.support.store import SMALL, Rig, error_of, read

OTHERS = {
    "layers": ModelCard(CARD.num_experts, CARD.top_k, (0, 1, 4)),  # numbered without the dense one
    "fewer": ModelCard(CARD.num_experts, CARD.top_k, (1, 2)),
    "experts": ModelCard(32, CARD.top_k, CARD.moe_layers),
    "top_k": ModelCard(CARD.num_experts, 3, CARD.moe_layers),
}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def of(card: ModelCard, rollout_id: str, number: int, epoch: int = 0, rows: int = 10, run: str = "run") -> Attempt:
    """All in one group, so in one partition."""
    return make_attempt(rollout_id, number=number, card=card, group="g", epoch=epoch, rows=rows, run=run)


def reasons(rig: Rig) -> list[str]:
    letters = rig.broker.cluster.topics[rig.topics.dlt].logs[0].records
    return [(dict(letter.headers)["reason"] or b"").decode() for letter in letters]


def details(rig: Rig) -> list[str]:
    letters = rig.broker.cluster.topics[rig.topics.dlt].logs[0].records
    return [(dict(letter.headers)["detail"] or b"").decode() for letter in letters]


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_of_another_model_is_set_aside_with_its_reason(rig: Rig, what: str) -> None:
    rig.put(of(CARD, "a", 1), of(OTHERS[what], "b", 2), of(CARD, "c", 3))
    with rig.running() as store:
        assert [error_of(store, one) for one in "abc"] == ["none", "RouteCorrupt", "none"]
        with pytest.raises(RouteCorrupt, match="not those of the model that this run began with"):
            store.find(Question(rollout_key("run", "b")))
        assert reasons(rig) == ["other_model"]  # its END finds it spoilt already
        other = OTHERS[what]
        says = f"{other.num_experts} experts, top-{other.top_k}, layers {list(other.moe_layers)}, card {other.digest}"
        assert details(rig) == [f"{says}; run run has the model card {CARD.digest}"]
    with rig.running() as store:  # the pin is in the store
        rig.put(of(OTHERS[what], "d", 4))
        rig.caught_up(store)
        assert error_of(store, "d") == "RouteCorrupt"


def test_a_rollout_without_rows_is_held_to_it_too(rig: Rig) -> None:
    rig.put(of(CARD, "a", 1, rows=0), of(OTHERS["experts"], "b", 2, rows=0), of(CARD, "c", 3))
    with rig.running() as store:
        assert [error_of(store, one) for one in "abc"] == ["none", "RouteCorrupt", "none"]


def test_only_a_whole_rollout_says_what_the_model_is(rig: Rig) -> None:
    early = of(OTHERS["experts"], "early", 1)
    rig.put_raw(early.chunks[0])
    rig.put(of(CARD, "a", 2))
    rig.put_raw(early.end)
    with rig.running() as store:
        assert [error_of(store, one) for one in ("early", "a")] == ["RouteCorrupt", "none"]


def test_other_runs_have_models_of_their_own(rig: Rig) -> None:
    rig.put(of(CARD, "a", 1), of(OTHERS["experts"], "a", 2, run="other"))
    with rig.running() as store:
        found = store.find(Question(rollout_key("other", "a")))
        assert found.meta.num_experts == 32
        assert error_of(store, "a") == "none"
        pins = {one.run: one.card for runs in store.runs().values() for one in runs}
        assert pins == {"run": CARD.digest, "other": OTHERS["experts"].digest}


def test_after_a_clear_the_next_epoch_may_bring_another_model(rig: Rig) -> None:
    rig.put(of(CARD, "a", 1), of(OTHERS["experts"], "b", 2, epoch=1))
    rig.fence(Delete("run", "a", attempt_id(80)))  # a delete is not enough
    rig.put(of(OTHERS["experts"], "c", 3, epoch=1))
    rig.fence(Clear("run", 0, attempt_id(81)))
    new = of(OTHERS["experts"], "d", 4, epoch=1)
    rig.put(new, of(CARD, "e", 5, epoch=1))
    for _ in range(2):  # also after a rebuild
        with rig.running() as store:
            assert [error_of(store, one) for one in "bce"] == ["RouteCorrupt"] * 3
            np.testing.assert_array_equal(read(store, "d"), new.routes)
        rig.folder = rig.folder / "again"


def test_the_card_of_the_settings_counts_from_the_first_record_and_through_a_clear(rig: Rig) -> None:
    rig.put(of(OTHERS["layers"], "a", 1), of(CARD, "b", 2))
    rig.fence(Clear("run", 0, attempt_id(81)))
    rig.put(of(OTHERS["layers"], "c", 3, epoch=1), of(CARD, "d", 4, epoch=1))
    options = replace(SMALL, rules=Rules(cards={"run": CARD.digest}))
    with rig.running(options=options) as store:
        assert [error_of(store, one) for one in "bcd"] == ["RouteDeleted", "RouteCorrupt", "none"]


def test_checks_off_looks_at_no_model(rig: Rig) -> None:
    rig.put(of(CARD, "a", 1), of(OTHERS["experts"], "b", 2))
    with rig.running(options=replace(SMALL, rules=Rules(checks="off"))) as store:
        assert [error_of(store, one) for one in "ab"] == ["none", "none"]


def test_an_end_that_names_no_card_pins_nothing(rig: Rig) -> None:
    first = of(CARD, "a", 1)
    end = decode(first.end)
    assert isinstance(end, End)
    for record in (*first.chunks, encode(replace(end, card_digest=None))):
        rig.put_raw(record)
    rig.put(of(OTHERS["experts"], "b", 2), of(CARD, "c", 3))
    with rig.running() as store:
        assert [error_of(store, one) for one in "abc"] == ["none", "none", "RouteCorrupt"]


def test_what_continues_a_base_is_of_its_model(rig: Rig) -> None:
    rig.put(of(CARD, "a", 1))
    base = Base(attempt_id(1), 10, "a")
    rig.put(make_attempt("b", number=2, rows=3, base=base, group="g", card=OTHERS["top_k"], outcome=Outcome()))
    with rig.running() as store:
        assert error_of(store, "b") == "RouteCorrupt"
