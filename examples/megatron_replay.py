"""Megatron-Core's form of a replay: one int64 [tokens, top_k] a router, of this rank's tokens and pipeline stage.

python examples/megatron_replay.py samples.jsonl --cp-rank 1 --cp-size 2      (in .venv-torch, `make torch`)
"""

import argparse
import json
from pathlib import Path

import torch

from moebus.consumers import MegatronShard, RoutingReader
from moebus.schemas import RouteRef

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("samples", type=Path)
options.add_argument("--cp-rank", type=int, default=0)
options.add_argument("--cp-size", type=int, default=1)
options.add_argument("--layers", type=int, nargs="*", help="global numbers of this stage's MoE layers")
given = options.parse_args()

samples = [json.loads(line) for line in given.samples.read_text().splitlines()]
refs, tokens = [RouteRef.parse(sample["routes"]) for sample in samples], [sample["tokens"] for sample in samples]
rank = MegatronShard(cp_rank=given.cp_rank, cp_size=given.cp_size)
with RoutingReader.from_settings() as reader:
    shard = reader.resolve_shard(refs, rank, tokens, wait=30, layers=given.layers)

replay, valid = [torch.from_numpy(one) for one in shard.per_router()], torch.from_numpy(shard.valid)
# With Megatron-Core, before the forward: RouterReplay.set_replay_data(replay), one entry a MoE layer of this stage.
report = {"layers": shard.layers, "shapes": [tuple(one.shape) for one in replay], "dtype": str(replay[0].dtype)}
print(json.dumps({**report, "recorded": int(valid.sum()), "sums": [int(one[valid].sum()) for one in replay]}))
