"""Routes by KV slot: valid rows only, the self check, and the layers of the card."""

from __future__ import annotations

import numpy as np
import pytest

from moebus.engine.paddle.capture import FLUSH_ROWS, FLUSH_STEPS, PositionCapture, RouteCapture, RouteMissing
from moebus.engine.paddle.runtime import load_paddle
from moebus.engine.paddle.slots import Ints, sequence_slots
from moebus.schemas.model_card import ModelCard
from tests.support.paddle import needs_paddle

CARD = ModelCard(300, 2, (1, 3, 4))
TABLE, GENERATIONS = [4, 1, 5], [7, 8, 9]


def ints(*values: int) -> Ints:
    return np.asarray(values, dtype=np.int64)


def capture(rows: int, version: str = "v1", first: int = 0) -> RouteCapture:
    """A capture whose `rows` rows of TABLE are written; row r has ids r, r + 1 in every layer."""
    made = RouteCapture(CARD, 64, 8)
    write(made, 0, rows, version)
    return made


def write(made: RouteCapture, start: int, stop: int, version: str) -> None:
    slots = sequence_slots(TABLE, stop, 8)[start:]
    ids = np.arange(start, stop)[:, None, None] + np.arange(2)
    shaped = np.broadcast_to(ids, (stop - start, 3, 2)).astype(CARD.dtype)
    made.write(slots, np.repeat(GENERATIONS, 8)[start:stop], version, shaped)


def test_gather_follows_the_block_table() -> None:
    routes, versions = capture(19).gather(TABLE, GENERATIONS, 19)
    assert routes.dtype == np.uint16
    assert routes.shape == (19, 3, 2)
    assert (routes[..., 0] == np.arange(19)[:, None]).all()
    assert versions == ((0, "v1"),)


def test_a_gathered_row_is_a_copy() -> None:
    made = capture(19)
    routes, _ = made.gather(TABLE, GENERATIONS, 19)
    write(made, 0, 8, "v2")
    before = routes.copy()
    made.write(ints(32), ints(7), "v2", np.zeros((1, 3, 2), CARD.dtype))
    assert np.array_equal(routes, before)


def test_a_row_that_was_never_written_is_reported() -> None:
    with pytest.raises(RouteMissing, match="1 of 20 rows were not captured, the first is row 19"):
        capture(19).gather(TABLE, GENERATIONS, 20)


def test_a_row_of_what_the_block_held_before_is_reported() -> None:
    with pytest.raises(RouteMissing, match=r"8 of 19 rows .* row 8"):
        capture(19).gather(TABLE, [7, 10, 9], 19)


def test_no_rows() -> None:
    routes, versions = RouteCapture(CARD, 64, 8).gather([], [], 0)
    assert routes.shape == (0, 3, 2)
    assert versions == ()


def test_versions_follow_the_rows() -> None:
    made = capture(19)
    write(made, 10, 19, "v2")
    assert made.gather(TABLE, GENERATIONS, 19)[1] == ((0, "v1"), (10, "v2"))


def test_rows_that_move_with_their_block_stay_what_they_are() -> None:
    made = capture(19, "v1")
    write(made, 10, 16, "v2")
    whole, versions = made.gather(TABLE, GENERATIONS, 19)
    moved = [made.copy_rows(sequence_slots([block], 8, 8), g) for block, g in zip(TABLE, GENERATIONS, strict=True)]
    made.write(sequence_slots(TABLE, 24, 8), np.repeat([20, 21, 22], 8), "v3", np.zeros((24, 3, 2), CARD.dtype))
    for block, generation, rows in zip((0, 7, 3), (30, 31, 32), moved, strict=True):
        made.restore_rows(sequence_slots([block], 8, 8), generation, rows)
    again, same = made.gather([0, 7, 3], [30, 31, 32], 19)
    assert np.array_equal(again, whole)
    assert same == versions == ((0, "v1"), (10, "v2"), (16, "v1"))
    with pytest.raises(RouteMissing, match="the first is row 19"):  # it was not there before either
        made.gather([0, 7, 3], [30, 31, 32], 20)
    stale = made.copy_rows(sequence_slots([TABLE[0]], 8, 8), 7)  # of a generation that is over
    made.restore_rows(sequence_slots([5], 8, 8), 40, stale)
    with pytest.raises(RouteMissing, match="8 of 8 rows"):
        made.gather([5], [40], 8)


@needs_paddle
@pytest.mark.paddle
def test_deferred_steps_are_written_in_order_before_anybody_reads() -> None:
    paddle = load_paddle()
    made = RouteCapture(CARD, 64, 8)
    for number in range(2 * FLUSH_STEPS + 3):
        step = made.step(ints(number % 5, 20 + number % 3), ints(number + 1, number + 1), f"v{number}")
        for layer in CARD.moe_layers:
            step(layer, paddle.to_tensor(np.full((2, 2), number)))
        step.finish()
    last = 2 * FLUSH_STEPS + 2
    expected = {(last - back) % 5: last - back for back in range(5)}
    for slot, number in expected.items():
        rows = made.copy_rows(ints(slot), number + 1)
        assert rows.valid.all()
        assert (rows.ids == number).all()


@needs_paddle
@pytest.mark.paddle
def test_the_hook_of_a_step_writes_by_layer_number() -> None:
    paddle = load_paddle()
    made = RouteCapture(CARD, 64, 8)
    step = made.step(ints(3, 9), ints(1, 2), "v1")
    for layer in (4, 1, 3):  # any order
        step(layer, paddle.to_tensor(np.asarray([[layer, 10], [20, layer]])))
    step.finish()
    routes, _ = made.gather([0], [1], 0)
    assert made._buffer[3].tolist() == [[1, 10], [3, 10], [4, 10]]
    assert made._buffer[9].tolist() == [[20, 1], [20, 3], [20, 4]]
    assert routes.dtype == np.uint16


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("seen", [(1, 3), (0, 1, 3, 4), (1, 3, 5)])
def test_layers_must_be_those_of_the_card(seen: tuple[int, ...]) -> None:
    made = RouteCapture(CARD, 64, 8)
    step = made.step(ints(0), ints(1), "v1")
    for layer in seen:
        step(layer, load_paddle().zeros([1, 2], dtype="int64"))
    with pytest.raises(RouteMissing, match="model card"):
        step.finish()
    with pytest.raises(RouteMissing, match="not captured"):
        made.gather([0], [1], 1)


@needs_paddle
@pytest.mark.paddle
def test_position_coded_rows_read_as_a_range() -> None:
    made = RouteCapture(CARD, 64, 8)
    slots = sequence_slots(TABLE, 19, 8)
    generations = np.repeat(GENERATIONS, 8)[:19]
    for part in (slice(0, 12), slice(12, 13), slice(13, 19)):
        step = PositionCapture(made, slots[part], generations[part], "v", np.arange(19)[part])
        for layer in CARD.moe_layers:
            step(layer, load_paddle().zeros([len(slots[part]), 2], dtype="int64"))
        step.finish()
    routes, _ = made.gather(TABLE, GENERATIONS, 19)
    assert (routes == np.arange(19)[:, None, None]).all()


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (0, 2), (2,)])
def test_what_is_no_row_of_ids_is_refused(shape: tuple[int, ...]) -> None:
    paddle = load_paddle()
    made = RouteCapture(CARD, 64, 8)
    step = made.step(ints(0), ints(1), "v1")
    for layer in CARD.moe_layers:
        step(layer, paddle.zeros(shape if layer == 3 else [1, 2], dtype="int64"))
    with pytest.raises(RouteMissing, match=r"layer 3 gave ids \[.*\], \[1, 2\] is needed"):
        step.finish()
    with pytest.raises(RouteMissing, match="not captured"):
        made.gather([0], [1], 1)


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("bad", [300, -1])
def test_an_id_out_of_range_is_reported_and_its_rows_are_missing(bad: int) -> None:
    paddle = load_paddle()
    made = RouteCapture(CARD, 64, 8)
    step = made.step(ints(0), ints(1), "v1")
    for layer in CARD.moe_layers:
        step(layer, paddle.to_tensor(np.asarray([[1, bad if layer == 3 else 2]])))
    step.finish()
    with pytest.raises(RouteMissing, match=r"an id outside 0\.\.299"):
        made.flush()
    with pytest.raises(RouteMissing, match="not captured"):
        made.gather([0], [1], 1)


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("others", ["none", "narrow", "suspended"])
def test_whole_orders_give_the_same_rows_as_their_first_ids(others: str) -> None:
    """Also beside steps that came in another way."""
    paddle, draw = load_paddle(), np.random.default_rng(0)
    made, plain = RouteCapture(CARD, 64, 8), RouteCapture(CARD, 64, 8)
    for number in range(8):
        slots, generations = ints(number, 20 + number), ints(1, 1)
        orders = {layer: np.argsort(draw.random((2, 40)), axis=-1) for layer in CARD.moe_layers}
        tensors = {layer: paddle.to_tensor(order) for layer, order in orders.items()}
        narrow = {layer: tensor[:, :2] for layer, tensor in tensors.items()}
        plain.add(slots, generations, "v", narrow)
        odd = number % 3 == 1
        made.suspended = odd and others == "suspended"
        made.add(
            slots,
            generations,
            "v",
            narrow if odd and others == "narrow" else tensors,
            whole=not odd or others == "none",
        )
        made.suspended = False
    expected, _ = plain.gather([0], [1], 8)
    if others == "suspended":
        assert made.gather_recorded([0], [1], 8)[0] is None
        assert np.array_equal(made.gather([0], [1], 1)[0], expected[:1])
    else:
        assert np.array_equal(made.gather([0], [1], 8)[0], expected)


@needs_paddle
@pytest.mark.paddle
def test_a_layer_that_is_missing_in_a_whole_step_is_reported() -> None:
    made = RouteCapture(CARD, 64, 8)
    made.add(
        ints(0), ints(1), "v", {layer: load_paddle().zeros([1, 40], dtype="int64") for layer in (1, 3)}, whole=True
    )
    with pytest.raises(RouteMissing, match=r"layers \[1, 3\] were seen"):
        made.flush()
    with pytest.raises(RouteMissing, match="not captured"):
        made.gather([0], [1], 1)


@needs_paddle
@pytest.mark.paddle
def test_many_rows_are_not_left_waiting_on_the_device() -> None:
    paddle = load_paddle()
    made = RouteCapture(CARD, FLUSH_ROWS, 8)
    for tokens, waits in ((FLUSH_ROWS - 2, 1), (1, 2), (1, 0), (FLUSH_ROWS, 0), (1, 1)):
        step = made.step(np.arange(tokens), np.ones(tokens, np.int64), "v1")
        for layer in CARD.moe_layers:
            step(layer, paddle.zeros([tokens, 2], dtype="int64"))
        step.finish()
        assert len(made._pending) == waits


def test_rows_of_a_suspended_time_are_told_apart_from_missing_ones() -> None:
    made = capture(8)
    made.suspended = True
    made.add(sequence_slots(TABLE, 12, 8)[8:], np.full(4, 8), "v2", {})
    assert made.gather_recorded(TABLE, GENERATIONS, 12) == (None, ((0, "v1"), (8, "v2")))
    with pytest.raises(RouteMissing, match="suspended"):
        made.gather(TABLE, GENERATIONS, 12)
    with pytest.raises(RouteMissing, match="1 of 13 rows were not captured, the first is row 12"):
        made.gather_recorded(TABLE, GENERATIONS, 13)
    routes, _ = made.gather_recorded(TABLE, GENERATIONS, 8)
    assert routes is not None
    assert len(routes) == 8
    moved = made.copy_rows(sequence_slots([1], 8, 8), 8)
    made.restore_rows(sequence_slots([6], 8, 8), 30, moved)
    assert made.gather_recorded([6], [30], 4) == (None, ((0, "v2"),))
