"""One request inside the simulated engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moebus.engine.port import FinishReason, Generation, Prompt
from moebus.engine.prompts import route_rows, tell_token
from moebus.engine.simulated.config import SimulatedConfig
from moebus.engine.simulated.oracle import chain, chain_next, chain_root, next_token, routes_of_states
from moebus.engine.spans import version_spans


class Running:
    """Tokens so far, and the chain state and version of every row computed."""

    def __init__(self, config: SimulatedConfig, prompt: Prompt) -> None:
        self._config = config
        self._prompt = prompt
        self.tokens: list[int] = prompt.token_ids.tolist()
        self.row_versions: list[str] = []
        self.cache_epoch = -1
        self._states: list[int] = []
        self._logprobs: list[float] = []
        self._head = 0
        self._version: str | None = None
        self._cached = 0

    @property
    def prefilled(self) -> bool:
        return bool(self._states)

    def step(self, version: str, cached_versions: Sequence[str] = ()) -> FinishReason | None:
        """Forwards what is not forwarded yet, samples one token; returns why it ended, if it did.

        `cached_versions`: one per cached block of the prompt, used by the first step only.
        """
        if not self.prefilled:
            self._take_cached(cached_versions)
        if version != self._version:  # new weights see the same tokens differently
            self._version = version
            root = chain_root(self._config.seed, version)
            self._head = chain(root, self.tokens[: len(self._states)])[-1] if self._states else root
        for token in self.tokens[len(self._states) :]:
            self._head = chain_next(self._head, token)
            self._states.append(self._head)
            self.row_versions.append(version)
        return self._sample()

    def _take_cached(self, versions: Sequence[str]) -> None:
        size = self._config.block_size
        self._cached = len(versions) * size
        for version in dict.fromkeys(versions):
            states = chain(chain_root(self._config.seed, version), self.tokens[: self._cached])
            rows = [row for row in range(self._cached) if versions[row // size] == version]
            self._states.extend(states[row] for row in rows)
            self.row_versions.extend(version for _ in rows)

    def _sample(self) -> FinishReason | None:
        prompt = self._prompt
        if prompt.max_tokens == 0:
            return "length"
        token, logprob = next_token(self._config, self._head, prompt.temperature, prompt.seed)
        self.tokens.append(token)
        self._logprobs.append(logprob)
        tell_token(prompt, token, logprob)
        if token in prompt.stop_token_ids:
            return "stop"
        return "length" if len(self._logprobs) >= prompt.max_tokens else None

    def finish(self, reason: FinishReason) -> Generation:
        """The result; what was sampled so far counts."""
        size = len(self._prompt.token_ids)
        rows = route_rows(size, len(self._logprobs), prefilled=self.prefilled)
        capture = self._prompt.capture_routes
        return Generation(
            request_id=self._prompt.request_id,
            prompt_tokens=size,
            token_ids=np.asarray(self.tokens[size:], dtype=np.int64),
            logprobs=np.asarray(self._logprobs, dtype=np.float32),
            finish_reason=reason,
            routes=routes_of_states(self._config, self._states[:rows]) if capture else None,
            versions=version_spans(self.row_versions[:rows]),
            cached_tokens=self._cached,
        )
