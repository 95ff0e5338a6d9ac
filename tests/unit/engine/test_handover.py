"""The format of a handover: what goes in comes out, and anything else is refused by name before memory is taken."""

from __future__ import annotations

import json
import pickle
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from moebus.engine.paddle.handover import FORMAT, MAGIC, Handover
from moebus.engine.paddle.handover_head import HandoverRefused, Head
from tests.support.background import Background
from tests.support.paddle import SMALL

FIXED = struct.Struct("<8sHHIQ")
CONFIG = replace(SMALL, draft_layers=1, eos_token_ids=(3, 5))


def made(rows: int = 11, routes: bool = True) -> Handover:
    draw = np.random.default_rng(rows)
    head = Head(
        request_id="r:0:0:0", config=CONFIG, weights_version="v1", weights_digest="d" * 32, prompt_tokens=rows,
        temperature=1.0, top_p=0.9, seed=4, first=(7, -0.25), routes=routes, versions=((0, "v0"), (5, "v1")),
        cached_tokens=4,
    )  # fmt: skip
    shape = (4, rows, 2, 8)
    return Handover(
        head,
        draw.integers(0, 128, rows),
        draw.standard_normal(shape, dtype=np.float32),
        draw.standard_normal(shape, dtype=np.float32),
        draw.integers(0, 8, (rows, 2, 2)).astype(np.uint8) if routes else None,
    )


def written(handover: Handover) -> bytes:
    stream = BytesIO()
    handover.write_to(stream)
    return stream.getvalue()


def read(data: bytes, **kwargs: int) -> Handover:
    return Handover.read_from(BytesIO(data), **kwargs)


def same(one: Handover, other: Handover) -> None:
    engine_fields = ("block_size", "num_blocks", "max_batch", "max_position")
    known = {name: getattr(other.head.config, name) for name in engine_fields}  # those are an engine's own
    assert replace(one.head, config=replace(one.head.config, **known)) == other.head
    for name in ("token_ids", "keys", "values"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert (one.routes is None) == (other.routes is None)
    if one.routes is not None:
        assert np.array_equal(one.routes, other.routes)  # type: ignore[arg-type]


@pytest.mark.parametrize("routes", [True, False])
@pytest.mark.parametrize("rows", [6, 300])
def test_what_goes_in_comes_out(tmp_path: Path, rows: int, routes: bool) -> None:
    one = made(rows, routes)
    same(one, read(written(one)))
    one.save(tmp_path / "h")
    same(one, Handover.load(tmp_path / "h"))
    assert [path.name for path in tmp_path.iterdir()] == ["h"]


def test_several_on_one_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as stream:
        sent = [made(6), made(7, False), made(200)]

        def send() -> None:
            with ours.makefile("wb") as out:
                for one in sent:
                    one.write_to(out)

        sending = Background(send)
        for one in sent:
            same(one, Handover.read_from(stream))
        sending.result()


class Short:
    """A stream without a buffer: it takes and gives a little at a time."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: memoryview) -> int:
        taken = min(len(data), 777)
        self.data += data[:taken]
        return taken

    def read(self, count: int) -> bytes:
        taken = bytes(self.data[: min(count, 555)])
        del self.data[: len(taken)]
        return taken

    def flush(self) -> None:
        pass


class Full(Short):
    def write(self, data: memoryview) -> int:
        return 0


def test_streams_that_take_and_give_little() -> None:
    stream = Short()
    made(40).write_to(stream)  # type: ignore[arg-type]
    assert bytes(stream.data) == written(made(40))
    same(made(40), Handover.read_from(stream))  # type: ignore[arg-type]
    with pytest.raises(BlockingIOError, match="takes nothing"):
        made(6).write_to(Full())  # type: ignore[arg-type]


def test_every_cut_is_refused() -> None:
    data = written(made(6))
    for size in [*range(0, 700, 7), *range(700, len(data), 131), len(data) - 1]:
        with pytest.raises(HandoverRefused):
            read(data[:size])


def test_every_flipped_byte_is_refused() -> None:
    data = written(made(6))
    for at in [*range(0, 900, 3), *range(900, len(data), 101), len(data) - 1]:
        spoilt = bytearray(data)
        spoilt[at] ^= 0x10
        with pytest.raises(HandoverRefused):
            read(bytes(spoilt))


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 64, pickle.dumps({"a": 1}), b"PK\x03\x04" * 20, b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"],
    ids=["nothing", "zeros", "a pickle", "a zip", "http"],
)
def test_what_is_no_handover(data: bytes) -> None:
    with pytest.raises(HandoverRefused, match=r"cut off|this is none"):
        read(data)


def test_an_older_or_newer_format() -> None:
    with pytest.raises(HandoverRefused, match="format 2 is not known"):
        read(FIXED.pack(MAGIC, 2, 0, 10, 10) + bytes(50))


class Endless:
    """A stream that never ends and counts what was taken of it."""

    def __init__(self, start: bytes) -> None:
        self._start = BytesIO(start)
        self.taken = 0

    def read(self, count: int) -> bytes:
        self.taken += count
        return self._start.read(count) or bytes(count)


@pytest.mark.parametrize(("head", "body"), [(1 << 31, 8), (64, 1 << 50), (64, (4 << 30) + 1)])
def test_sizes_beyond_the_limit_take_nothing(head: int, body: int) -> None:
    stream = Endless(FIXED.pack(MAGIC, FORMAT, 0, head, body))
    with pytest.raises(HandoverRefused, match="more than"):
        Handover.read_from(stream)  # type: ignore[arg-type]
    assert stream.taken == FIXED.size


def test_a_limit_of_ones_own() -> None:
    one = made(6)
    read(written(one), max_bytes=one.nbytes)
    with pytest.raises(HandoverRefused, match="more than"):
        read(written(one), max_bytes=one.nbytes - 1)


def test_a_file_with_more_behind_it(tmp_path: Path) -> None:
    (tmp_path / "h").write_bytes(written(made(6)) + b"x")
    with pytest.raises(HandoverRefused, match="goes on"):
        Handover.load(tmp_path / "h")


def forged(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A handover with another head, its checksum right."""
    data = written(made(6))
    _, _, _, size, body = FIXED.unpack(data[: FIXED.size])
    head = json.loads(data[FIXED.size : FIXED.size + size])
    raw = json.dumps(change(head) or head).encode()
    start = FIXED.pack(MAGIC, FORMAT, 0, len(raw), body) + raw + data[FIXED.size + size : -16]
    return start + xxhash.xxh3_128_digest(start)


def test_a_forged_head_would_do() -> None:
    same(made(6), read(forged(lambda head: None)))


def _set(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda head: head.update({name: value})


def _model(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda head: head["config"].update({name: value})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda head: [1], "fields"),
        (lambda head: head.pop("seed") and None, "fields"),
        (_set("more", 1), "fields"),
        (_set("request_id", ""), "request_id"),
        (_set("request_id", 5), "request_id"),
        (_set("weights_version", "v" * 5000), "weights_version"),
        (_set("prompt_tokens", 0), "prompt_tokens"),
        (_set("prompt_tokens", True), "prompt_tokens"),
        (_set("prompt_tokens", 7), "not what it says"),
        (_set("prompt_tokens", 1 << 61), "not what it says"),
        (_set("prompt_tokens", -1), "prompt_tokens"),
        (_set("routes", False), "not what it says"),
        (_set("routes", 1), "routes"),
        (_set("seed", -1), "seed"),
        (_set("temperature", "1"), "temperature"),
        (_set("top_p", float("nan")), "top_p"),
        (_set("first", [7]), "first"),
        (_set("first", ["7", -1.0]), "first"),
        (_set("first", [7, float("inf")]), "first"),
        (_set("first", [128, -1.0]), "a token of"),
        (_set("versions", []), "versions"),
        (_set("versions", [[1, "v"]]), "versions"),
        (_set("versions", [[0, "v"], [0, "w"]]), "versions"),
        (_set("versions", [[0, 3]]), "versions"),
        (_set("versions", [[0, "v"], [6, "w"]]), "behind the end"),
        (_set("cached_tokens", 6), "behind the end"),
        (_set("config", {}), "model"),
        (_model("num_layers", "3"), "num_layers"),
        (_model("num_layers", 1 << 40), "layers"),
        (_model("num_layers", 0), "cannot be"),
        (_model("num_layers", 4), "not what it says"),
        (_model("hidden_size", 1 << 40), "not what it says"),
        (_model("eos_token_ids", ["3"]), "eos_token_ids"),
        (_model("num_experts", 4), r"outside 0\.\.3"),
        (_model("vocab_size", 8), "a token of"),
        (_model("norm_topk", 1), "norm_topk"),
    ],
)
def test_a_head_that_lies(change: Callable[[dict[str, Any]], object], text: str) -> None:
    with pytest.raises(HandoverRefused, match=text) as caught:
        read(forged(change))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


VALUES: list[Any] = [None, True, 0, -1, 1, 7, 1 << 70, -1.5, "", "x", "\0", [], [[]], [0], [[0, "v"]], {}, {"a": 1}]


def test_heads_at_random_are_refused_or_right() -> None:
    draw, names = np.random.default_rng(0), list(json.loads(made(6).head.to_json()))
    model = list(json.loads(made(6).head.to_json())["config"])
    refused: list[str] = []
    for _ in range(600):
        name, value = draw.choice([*names, *model]), VALUES[draw.integers(len(VALUES))]
        data = forged(_set(name, value) if name in names else _model(name, value))
        try:
            read(data).check()
        except HandoverRefused as error:
            refused.append(str(error))
    assert len(refused) > 500
    assert not any("\n" in text for text in refused)


def test_a_deep_head() -> None:
    raw = b"[" * 100_000
    with pytest.raises(HandoverRefused, match="not JSON"):
        read(FIXED.pack(MAGIC, FORMAT, 0, len(raw), 0) + raw + bytes(16))


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    broken = replace(made(6), keys=None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        broken.save(tmp_path / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"
