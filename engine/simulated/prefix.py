"""The simulated prefix cache: which full blocks of tokens are held, and the version each was computed under."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moebus.engine.simulated.config import SimulatedConfig
from moebus.engine.simulated.oracle import chain, chain_root


class PrefixCache:
    """Blocks by hash chain, oldest use first out. The caller holds the engine's lock.

    `epoch` grows with every reset: a request that began before one must not store its blocks after it.
    """

    def __init__(self, config: SimulatedConfig) -> None:
        self._config = config
        self._salt = ""
        self.epoch = 0
        self._blocks: OrderedDict[int, str] = OrderedDict()

    def reset(self, salt: str) -> int:
        """Drops every block; new ones are salted with `salt`. Returns the blocks dropped."""
        dropped = len(self._blocks)
        self._blocks.clear()
        self._salt = salt
        self.epoch += 1
        return dropped

    def match(self, prompt: Sequence[int]) -> list[str]:
        """The version of each cached block at the start of `prompt`, never covering its last token."""
        versions = []
        for key in self._keys(prompt[: len(prompt) - 1]):
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            versions.append(self._blocks[key])
        return versions

    def store(self, tokens: Sequence[int], row_versions: Sequence[str]) -> None:
        """Keeps the full blocks of `tokens` [rows], up to the first one that was computed under two versions."""
        size = self._config.block_size
        for index, key in enumerate(self._keys(tokens)):
            versions = set(row_versions[index * size : (index + 1) * size])
            if len(versions) > 1:
                break
            self._blocks.setdefault(key, versions.pop())
        while len(self._blocks) > self._config.cached_blocks:
            self._blocks.popitem(last=False)

    def _keys(self, tokens: Sequence[int]) -> list[int]:
        size = self._config.block_size
        return chain(chain_root(self._config.seed, self._salt), tokens)[size - 1 :: size]
