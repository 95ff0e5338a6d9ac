"""What reading routes out of another engine's answer costs, beside its client's own line (base64 and numpy, no check).

Ours also picks the MoE layers, checks every id, finds what was not recorded and narrows the type.

    python bench/bench_answers.py [--tokens 32768]
"""

from __future__ import annotations

import argparse
import base64
import io
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moebus.engine import sglang, vllm
from moebus.schemas.layouts import to_all_layers, to_sglang
from moebus.schemas.model_card import ModelCard

CARDS = (
    ModelCard(128, 8, tuple(range(48)), name="128 experts, 48 x top-8", num_hidden_layers=48),
    ModelCard(256, 8, tuple(range(3, 61)), name="256 experts, 58 of 61 x top-8", num_hidden_layers=61),
    ModelCard(384, 8, tuple(range(1, 61)), name="384 experts, 60 of 61 x top-8", num_hidden_layers=61),
)
OUTPUT = 1024
ROUNDS = 3


def routes_of(card: ModelCard, rows: int) -> npt.NDArray[np.unsignedinteger]:
    first = np.random.default_rng(1).integers(0, card.num_experts, (rows, len(card.moe_layers), 1))
    return ((first + np.arange(card.top_k)) % card.num_experts).astype(card.dtype)


def npy(array: npt.NDArray[np.integer]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some rounds."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def line(name: str, form: str, text: str, ours: float, theirs: float) -> None:
    print(f"{name:30} {form:12} {len(text) / 1e6:9.1f} {ours * 1e3:9.0f} {theirs * 1e3:9.0f} {ours / theirs:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the sequence, prompt and output")
    tokens = parser.parse_args().tokens
    print(f"{'model':30} {'form':12} {'MB of text':>9} {'ours, ms':>9} {'bare, ms':>9} {'ratio':>6}")
    counts = {"prompt_tokens": tokens - OUTPUT, "completion_tokens": OUTPUT}
    for card in CARDS:
        routes, depth = routes_of(card, tokens - 1), card.num_hidden_layers or 0
        text = npy(to_all_layers(routes, card.moe_layers, depth))
        answer = {"choices": [{"finish_reason": "stop", "routed_experts": text}], "usage": counts}
        ours, theirs = decode_times(vllm.decode_routes, answer, card, lambda text=text: np.load(  # type: ignore[misc]
            io.BytesIO(base64.b64decode(text))))  # fmt: skip
        line(card.name or "", "vLLM, npy", text, ours, theirs)
        text = to_sglang(routes, card.moe_layers, depth)
        meta = {"meta_info": {**counts, "finish_reason": {"type": "stop"}, "routed_experts": text}}
        ours, theirs = decode_times(sglang.decode_routes, meta, card, lambda text=text: np.frombuffer(  # type: ignore[misc]
            base64.b64decode(text), np.int32))  # fmt: skip
        line(card.name or "", "SGLang, int32", text, ours, theirs)


def decode_times(
    decode: Callable[[object, ModelCard], object], answer: object, card: ModelCard, bare: Callable[[], object]
) -> tuple[float, float]:
    return best(lambda: decode(answer, card)), best(bare)


if __name__ == "__main__":
    main()
