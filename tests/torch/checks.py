"""What holds of batches in torch; runs in torch's environment: `.venv-torch/bin/python -m tests.torch.checks`.

Prints one JSON object: check -> "ok" or why it does not hold.
"""

from __future__ import annotations

import ast
import base64
import json
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moebus.consumers.reader.batch import RouteBatch, Shape, build_batch
from moebus.consumers.reader.rollout import Rollout
from moebus.schemas.attempt import attempt_text
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard
from moebus.schemas.route_ref import RouteRef
from tests.support.routes import attempt_id, make_routes

LAYERS = (1, 2, 5)
DEPTH = 7
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_step.py"
TYPES = {16: torch.uint8, 384: torch.uint16, 70_000: torch.uint32}
"""By the number of experts."""


def batch(experts: int = 16) -> tuple[RouteBatch, list[RouteArray]]:
    """Rollouts of 5 and 3 tokens, of which 4 and 2 were forwarded; and their routes."""
    card = ModelCard(experts, 2, LAYERS)
    routes = [make_routes(4, card, 1), make_routes(2, card, 2)]
    found = [
        Rollout(
            RouteRef("run", f"r{n}", 0, attempt_text(attempt_id(n)), len(rows)), rows, LAYERS, 2, experts, "complete"
        )
        for n, rows in enumerate(routes)
    ]
    return build_batch([one.ref for one in found], found, Shape(LAYERS, 2, experts), [5, 3]), routes


def check_torch_shares_the_memory() -> None:
    for experts, dtype in TYPES.items():
        one, _ = batch(experts)
        given = one.torch()
        for tensor, array in ((given.routes, one.routes), (given.valid, one.valid), (given.cu_seqlens, one.cu_seqlens)):
            assert tensor.data_ptr() == array.ctypes.data
            assert tuple(tensor.shape) == array.shape
            assert tensor.is_contiguous()
        assert (given.routes.dtype, given.valid.dtype, given.cu_seqlens.dtype) == (dtype, torch.bool, torch.int32)
        given.routes[0, 0, 0] = 7
        assert one.routes[0, 0, 0] == 7  # written through
        one.routes[1, 2] = [3, 4]
        assert given.routes[1, 2].tolist() == [3, 4]


def check_shards_and_rectangles_share_it_too() -> None:
    one, _ = batch()
    for array in (one.padded().routes, one.padded().valid, *one.per_router()):
        assert torch.from_numpy(array).data_ptr() == array.ctypes.data
    assert {torch.from_numpy(ids).dtype for ids in one.per_router()} == {torch.int64}


def check_the_end_of_the_batch_keeps_its_memory_alive() -> None:
    given = batch()[0].torch()  # the batch itself is gone
    held = [torch.empty(1 << 16, dtype=torch.uint8) for _ in range(8)]
    assert given.routes[:4].tolist() == batch()[1][0].tolist()
    assert len(held) == 8


def check_slime_and_miles() -> None:
    for experts in (16, 384):
        one, routes = batch(experts)
        for exported in (one.export.slime(), one.export.miles()):
            tensors = [torch.from_numpy(array) for array in exported]
            assert [tuple(tensor.shape) for tensor in tensors] == [(4, 3, 2), (2, 3, 2)]
            assert tensors[0].dtype == torch.int32
            assert [tensor.tolist() for tensor in tensors] == [rows.tolist() for rows in routes]
        wide = torch.from_numpy(one.export.slime(num_hidden_layers=DEPTH)[0])
        assert wide[:, list(LAYERS)].tolist() == routes[0].tolist()
        assert not wide[:, [0, 3, 4, 6]].any()


def check_verl() -> None:
    for experts in (16, 384):
        one, routes = batch(experts)
        tensors = [torch.from_numpy(array) for array in one.export.verl()]
        assert [tuple(tensor.shape) for tensor in tensors] == [(5, 3, 2), (3, 3, 2)]
        assert tensors[0].dtype == torch.int16
        assert tensors[1][:-1].tolist() == routes[1].tolist()
        assert not tensors[0][-1].any()


def check_sglang() -> None:
    for experts in (16, 384):
        one, routes = batch(experts)
        text = one.export.sglang(num_hidden_layers=DEPTH)[0]
        flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int32)
        assert flat.reshape(-1, DEPTH, 2)[:, list(LAYERS)].tolist() == routes[0].tolist()


def check_ids_index_a_gate() -> None:
    one, routes = batch(384)
    scores = torch.randn(8, 384, requires_grad=True)
    picked = scores.gather(-1, torch.from_numpy(one.per_router([2])[0]))
    assert (
        picked[:4].detach().numpy().tolist()
        == np.take_along_axis(scores.detach().numpy()[:4], routes[0][:, 1].astype(np.int64), 1).tolist()
    )
    picked.sum().backward()
    assert scores.grad is not None
    assert int((scores.grad != 0).sum()) == 8 * 2


def check_a_replay_of_its_own_choice_changes_nothing() -> None:
    moe = _example_moe()
    torch.manual_seed(3)
    router, experts = torch.nn.Linear(8, 6), torch.randn(6, 8, 8, requires_grad=True)
    x = torch.randn(10, 8)
    chosen = router(x).topk(2).indices
    gate = torch.softmax(router(x), -1).topk(2).values
    gate = gate / gate.sum(-1, keepdim=True)
    plain = x + sum(gate[:, k, None] * torch.bmm(x[:, None], experts[chosen[:, k]])[:, 0] for k in range(2))
    assert torch.allclose(moe(x, router, experts, chosen), plain, atol=1e-6)
    other = (chosen + 1) % 6  # another path: another result, and gradients all the same
    replayed = moe(x, router, experts, other)
    assert not torch.allclose(replayed, plain, atol=1e-3)
    replayed.square().sum().backward()
    assert router.weight.grad is not None
    assert experts.grad is not None
    assert float(router.weight.grad.norm()) > 1e-3
    used = set(other.flatten().tolist())
    assert {expert for expert in range(6) if float(experts.grad[expert].norm()) > 0} == used


def check_paddle_is_not_here() -> None:
    assert find_spec("paddle") is None


def _example_moe() -> Callable[..., Any]:
    """The function of the example, without running the rest of it."""
    tree = ast.parse(EXAMPLE.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(tree, str(EXAMPLE), "exec"), scope)
    moe: Callable[..., Any] = scope["moe"]
    return moe


def main() -> None:
    report = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                report[name] = "ok"
            except Exception:
                report[name] = traceback.format_exc()
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main()
