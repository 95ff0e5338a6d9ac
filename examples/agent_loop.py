"""Agents against a vLLM server: several conversations at once, each turn's routes published, RouteRefs handed on.

python examples/agent_loop.py --url http://127.0.0.1:8000 --model-config config.json --agents 4 > samples.jsonl
"""

import argparse
import asyncio
import json
from pathlib import Path

import httpx

from moebus.producers import AsyncRoutingPublisher
from moebus.schemas import ModelCard, RouteRef

TURNS, NEW_TOKENS = 3, 8


async def conversation(client: httpx.AsyncClient, publisher: AsyncRoutingPublisher, number: int) -> dict[str, object]:
    """One trajectory; its last turn's RouteRef covers every turn."""
    tokens, mask = [1, 2, 3 + number], [0, 0, 0]
    base: RouteRef | None = None
    for turn in range(TURNS):
        held = 0 if base is None else base.rows  # rows that the turns before have sent: the server leaves them out
        body = {
            "prompt": tokens,
            "max_tokens": NEW_TOKENS,
            "return_token_ids": True,
            "routed_experts_prompt_start": held,
        }
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        receipts = await publisher.publish_response("vllm", answer, f"task-{number}:0:{turn}:0", start=held, base=base)
        base = receipts.ref  # known at once; `await receipts` waits until Kafka has it
        sampled = answer["choices"][0]["token_ids"]
        tokens, mask = tokens + sampled, mask + [1] * len(sampled)
        if turn < TURNS - 1:
            tokens, mask = [*tokens, 4, 5 + turn], [*mask, 0, 0]  # what a tool says to it
    return {"tokens": tokens, "mask": mask, "routes": str(base)}


async def main(url: str, card: ModelCard, agents: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        publisher = await AsyncRoutingPublisher.from_settings(card=card)
        async with publisher:
            for sample in await asyncio.gather(*(conversation(client, publisher, n) for n in range(agents))):
                print(json.dumps(sample))
            assert await publisher.flush(30), "routes that Kafka has not"


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--model-config", type=Path, required=True)
    options.add_argument("--agents", type=int, default=4)
    given = options.parse_args()
    asyncio.run(main(given.url, ModelCard.from_hf_config(json.loads(given.model_config.read_text())), given.agents))
