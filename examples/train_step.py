"""A training step in torch that takes the rollout's path: experts as recorded, gate weights recomputed.

python examples/train_step.py samples.jsonl       (in .venv-torch, `make torch`; samples as agent_loop.py prints them)
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn import functional

from moebus.consumers import RoutingReader
from moebus.schemas import RouteRef

HIDDEN, VOCAB = 32, 512


def moe(x: torch.Tensor, router: torch.nn.Linear, experts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """x [tokens, hidden]; experts [num_experts, hidden, hidden]; ids int64 [tokens, top_k]: given, not chosen."""
    gate = torch.softmax(router(x), dim=-1).gather(-1, ids)  # the choice is replayed, the weights are not
    gate = gate / gate.sum(-1, keepdim=True)
    return x + torch.einsum("tk,th,tkhg->tg", gate, x, experts[ids])


samples = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
with RoutingReader.from_settings() as reader:
    batch = reader.resolve([RouteRef.parse(s["routes"]) for s in samples], [s["tokens"] for s in samples], wait=30)

torch.manual_seed(0)
tokens = torch.tensor([token for sample in samples for token in sample["tokens"]])
embed, head = torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB)
routers = [torch.nn.Linear(HIDDEN, batch.num_experts) for _ in batch.layers]
experts = [torch.nn.Parameter(torch.randn(batch.num_experts, HIDDEN, HIDDEN) / HIDDEN) for _ in batch.layers]

hidden = embed(tokens)
for router, weights, ids in zip(routers, experts, batch.per_router(), strict=True):
    hidden = moe(hidden, router, weights, torch.from_numpy(ids))
train = torch.tensor([flag for s in samples for flag in s["mask"]]).bool().roll(-1)  # rows that sampled a token
loss = functional.cross_entropy(head(hidden)[train], tokens.roll(-1)[train])
loss.backward()
replayed = int(batch.torch().valid[train].sum())
gradients = [float(router.weight.grad.norm()) for router in routers]
print(json.dumps({"loss": loss.item(), "trained": int(train.sum()), "replayed": replayed, "gradients": gradients}))
