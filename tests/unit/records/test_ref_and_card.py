from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.route_errors import ROUTE_ERRORS, RouteDeleted, route_error
from moebus.schemas.route_ref import RouteRef, token_hash

ATTEMPT = "01" + "ABCDEFGHJKMNPQRSTVWXYZ00"
IDS = st.text(min_size=1, max_size=255).filter(lambda text: _fits(text))
HASHES = st.none() | st.text("0123456789abcdef", min_size=32, max_size=32)


def _fits(text: str) -> bool:
    try:
        return len(text.encode()) <= 255
    except UnicodeEncodeError:
        return False


@given(IDS, st.none() | IDS, st.integers(0, 65535), st.integers(0, 2**31 - 1), HASHES, HASHES)
def test_ref_round_trip(
    rollout_id: str, group: str | None, choice: int, rows: int, tokens: str | None, prompt: str | None
) -> None:
    ref = RouteRef("run", rollout_id, choice, ATTEMPT, rows, group, tokens, rows if prompt else None, prompt)
    text = str(ref)
    assert text == ref.to_json()
    assert len(text.encode()) < 1024
    assert RouteRef.parse(text) == RouteRef.parse(text.encode()) == RouteRef.from_dict(json.loads(text)) == ref


def test_longest_ref_is_below_1_kb() -> None:
    for char in ("x", "\x01", '"', "é", "\u20ac"):
        text = char * (255 // len(char.encode()))
        ref = RouteRef("r" * 64, text, 65535, ATTEMPT, 2**31 - 1, text + "", "a" * 32, 2**31 - 1, "b" * 32)
        other = RouteRef("r" * 64, text, 65535, ATTEMPT, 2**31 - 1, text[:-1] + "z", "a" * 32, 2**31 - 1, "b" * 32)
        assert ref.group is None
        assert len(str(other).encode()) < 1024
        assert RouteRef.parse(str(other)) == other


def test_default_group_is_left_out() -> None:
    ref = RouteRef("run", "a:0:1:0", 0, ATTEMPT, 3, group="a")
    assert ref.group is None
    assert ref.effective_group == "a"
    assert "group" not in ref.to_dict()
    assert RouteRef("run", "a:0:1:0", 0, ATTEMPT, 3, group="b").effective_group == "b"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"run": "a/b"}, "run"), ({"choice": "0"}, "choice"), ({"rows": -1}, "rows"), ({"attempt": 5}, "attempt"),
        ({"token_hash": "A" * 32}, "token_hash"), ({"extra": 1}, "extra"), ({"id": 3}, "id"), ({"id64": "YQ=="}, "id"),
        ({"group64": "?"}, "group"), ({"prompt_rows": True}, "prompt_rows"),
    ],
)  # fmt: skip
def test_bad_refs_name_the_field(change: dict[str, object], field: str) -> None:
    good: dict[str, object] = {"run": "run", "id": "a", "choice": 0, "attempt": ATTEMPT, "rows": 1}
    assert RouteRef.from_dict(good).rows == 1
    with pytest.raises(InvalidInput, match=field):
        RouteRef.from_dict({**good, **change})
    with pytest.raises(InvalidInput, match="missing"):
        RouteRef.from_dict({key: value for key, value in good.items() if key != "rows"})


@pytest.mark.parametrize("text", ["", "[]", "nonsense", "{}", "1", "x" * 2000])
def test_text_that_is_no_ref(text: str) -> None:
    with pytest.raises(InvalidInput):
        RouteRef.parse(text)


def test_token_hash_is_over_little_endian_int64() -> None:
    expected = token_hash(np.array([1, 2, 3], dtype="<i8"))
    assert expected == token_hash([1, 2, 3]) == token_hash(np.array([1, 2, 3], dtype=">i4"))
    assert expected != token_hash([1, 2])
    assert token_hash([]) == "99aa06d3014798d86001c324468d497f"  # XXH3-128 of nothing
    for bad in ([[1]], [1.5]):
        with pytest.raises(InvalidInput, match="token_ids"):
            token_hash(bad)


def test_card_round_trip_and_digest() -> None:
    card = ModelCard(128, 8, (3, 4, 9), name="m")
    assert ModelCard.from_json(card.to_json()) == card
    assert ModelCard.from_dict(card.to_dict()).digest == ModelCard(128, 8, (3, 4, 9)).digest
    assert card.digest != ModelCard(128, 8, (3, 4)).digest
    assert card.digest == "0a059033f7f077dba3379eb9e13e28a0"
    assert card.shape(5) == (5, 3, 8)
    assert card.dtype == "uint8"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_experts": 0}, "num_experts"), ({"top_k": 129}, "top_k"), ({"top_k": 0}, "top_k"),
        ({"moe_layers": []}, "moe_layers"), ({"moe_layers": [2, 1]}, "moe_layers"), ({"moe_layers": 3}, "moe_layers"),
        ({"moe_layers": [1, 1]}, "moe_layers"), ({"moe_layers": [70000]}, "moe_layers"), ({"x": 1}, "x"),
        ({"id_space": "physical"}, "id_space"), ({"name": 3}, "name"),
    ],
)  # fmt: skip
def test_bad_cards_name_the_field(change: dict[str, object], field: str) -> None:
    good: dict[str, object] = {"num_experts": 128, "top_k": 8, "moe_layers": [1, 2]}
    assert ModelCard.from_dict(good).top_k == 8
    with pytest.raises(InvalidInput, match=field):
        ModelCard.from_dict({**good, **change})


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 2, "moe_layer_freq": 2}, (2, 4)),
        ({"num_experts": 64, "num_experts_per_tok": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ({"num_local_experts": 64, "num_experts_per_tok": 6}, (0, 1, 2, 3, 4)),
        ({"moe_num_experts": 64, "moe_k": 6, "moe_layer_start_index": 2, "moe_layer_end_index": -1}, (2, 3, 4)),
    ],
)  # fmt: skip
def test_cards_of_known_families(config: dict[str, object], layers: tuple[int, ...]) -> None:
    whole = {"num_hidden_layers": 5, **config}
    assert ModelCard.from_hf_config(whole) == ModelCard(64, 6, layers)
    assert ModelCard.from_hf_config({"text_config": whole}, name="m").name == "m"
    with pytest.raises(InvalidInput, match="num_hidden_layers"):
        ModelCard.from_hf_config(config)
    with pytest.raises(InvalidInput, match="n_routed_experts"):
        ModelCard.from_hf_config({"num_hidden_layers": 5})


def test_route_errors_carry_their_http_code() -> None:
    codes = {name: error.http for name, error in ROUTE_ERRORS.items()}
    assert codes == {
        "RouteNotYet": 404, "RouteNeverComing": 410, "RouteDeleted": 410, "RouteCorrupt": 422,
        "AmbiguousAttempt": 409, "StoreCatchingUp": 503,
    }  # fmt: skip
    assert isinstance(route_error("RouteDeleted", "gone"), RouteDeleted)
    assert str(route_error("New", "text")) == "text"
