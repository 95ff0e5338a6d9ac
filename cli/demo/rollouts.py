"""The demo's rollout side: 4 prompts x 4 samples x 2 turns over HTTP, as an RL driver would ask for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from moebus.schemas.errors import RetriableError
from moebus.schemas.route_ref import RouteRef

PROMPTS = ("a", "b", "c", "d")
SAMPLES = (0, 1, 2, 10)
"""Sample numbers; `a:1` and `a:10` show that a delete by prefix keeps to whole parts."""
TURNS = 2
_RETRY_SECONDS = 0.05
_GIVE_UP_SECONDS = 120.0


class RoundFailed(RetriableError):
    """A request of the round was not served; the text names it and the last answer."""


@dataclass(frozen=True)
class Finished:
    """One finished request, as it goes into a replay buffer: tokens and a reference to the routes.

    `tokens`: int64 [P + O]; `prompt_tokens` = P; `logprobs`: float32 [O], of the sampled tokens.
    """

    rollout_id: str
    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    prompt_tokens: int
    cached_tokens: int
    versions: tuple[str, ...]
    worker: str
    ref: RouteRef


class Round:
    """Runs the round in threads; finished requests come out of `finished` in any order, None at the end."""

    def __init__(self, urls: dict[str, str], vocab: int, *, seed: int, on_done: Callable[[], None]) -> None:
        """`urls`: worker id -> base URL. All turns of a trajectory go to one worker, where its cache is."""
        self._urls = sorted(urls.items())
        self._vocab = vocab
        self._seed = seed
        self._on_done = on_done
        self._stop = threading.Event()
        self._client = httpx.Client(timeout=60.0, limits=httpx.Limits(max_connections=32))
        self.finished: queue.Queue[Finished | None] = queue.Queue()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="round", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the round early; waits for the requests on the way."""
        self._stop.set()
        self._thread.join(30)
        self._client.close()

    def _run(self) -> None:
        jobs = [(p, s) for p in range(len(PROMPTS)) for s in range(len(SAMPLES))]
        try:
            with ThreadPoolExecutor(8, thread_name_prefix="rollout") as pool:
                for future in [pool.submit(self._trajectory, p, s) for p, s in jobs]:
                    future.result()
        except Exception as exc:
            self.failure = exc
        finally:
            self.finished.put(None)

    def _trajectory(self, prompt: int, sample: int) -> None:
        rng = np.random.default_rng((self._seed, prompt))
        tokens = rng.integers(1, self._vocab, size=24 + 4 * prompt)
        worker, url = self._urls[(prompt * len(SAMPLES) + sample) % len(self._urls)]
        for turn in range(TURNS):
            if turn:
                # The user's (or a tool's) words between two turns: the history is repeated in front of them.
                words = np.random.default_rng((self._seed, prompt, sample, turn)).integers(1, self._vocab, size=8)
                tokens = np.concatenate([tokens, words])
            rollout_id = f"{PROMPTS[prompt]}:{SAMPLES[sample]}:{turn}:0"
            answer = self._ask(url, rollout_id, tokens, seed=1000 * prompt + 10 * sample + turn)
            sampled = np.asarray(answer["token_ids"], dtype=np.int64)
            tokens = np.concatenate([tokens, sampled])
            self.finished.put(_finished(rollout_id, worker, tokens, answer))
            self._on_done()

    def _ask(self, url: str, rollout_id: str, tokens: npt.NDArray[np.int64], seed: int) -> dict[str, Any]:
        """Asks until served: a paused worker answers 503 and is asked again, as a driver does."""
        body = {
            "token_ids": tokens.tolist(),
            "rollout_id": rollout_id,
            "max_tokens": 20,
            "temperature": 0.8,
            "top_p": 0.95,
            "seed": seed,
        }
        last = "no answer"
        deadline = time.monotonic() + _GIVE_UP_SECONDS
        while time.monotonic() < deadline and not self._stop.is_set():
            try:
                answer = self._client.post(f"{url}/v1/generate", json=body)
            except httpx.TransportError as exc:
                last = str(exc)
            else:
                if answer.status_code == 200:
                    return dict(answer.json())
                last = answer.text
                if answer.status_code != 503:
                    break
            self._stop.wait(_RETRY_SECONDS)
        raise RoundFailed(f"{rollout_id} was not served by {url}: {last}")


def _finished(rollout_id: str, worker: str, tokens: npt.NDArray[np.int64], answer: dict[str, Any]) -> Finished:
    return Finished(
        rollout_id=rollout_id,
        tokens=tokens,
        logprobs=np.asarray(answer["logprobs"], dtype=np.float32),
        prompt_tokens=answer["prompt_tokens"],
        cached_tokens=answer["cached_tokens"],
        versions=tuple(version for _, version in answer["versions"]),
        worker=worker,
        ref=RouteRef.from_dict(answer["route_ref"]),
    )
