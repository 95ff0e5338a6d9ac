"""What a mirror should hold, from the index of the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from moebus.consumers.store import keys
from moebus.consumers.store.env import EnvClosed
from moebus.consumers.store.partition import Partition
from moebus.consumers.store.progress import Progress
from moebus.consumers.store.state import AttemptState, status_of
from moebus.consumers.store.view import View, rows_of
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.layouts import to_fastdeploy
from moebus.schemas.rollout import RolloutKey
from moebus.schemas.route_errors import StoreCatchingUp

_PAGE = 200


class Wanted:
    """Choice 0 of every rollout of one run that is complete; of several attempts the last. FastDeploy's keys know
    neither choice nor attempt."""

    def __init__(self, partitions: Mapping[int, Partition], progress: Progress, run: str) -> None:
        self.run = run
        self._partitions = partitions
        self._progress = progress

    def find(self, rollout_id: str) -> tuple[int, AttemptState] | None:
        """(partition, attempt); None where nothing is to be mirrored.

        Raises:
            StoreCatchingUp: the index does not say yet.
        """
        self._check()
        found: list[tuple[int, AttemptState]] = []
        try:
            for number, partition in list(self._partitions.items()):
                attempts = View(partition).find(RolloutKey(self.run, rollout_id)).attempts
                found += [(number, state) for state in attempts if status_of(state) == "complete"]
        except EnvClosed:
            raise StoreCatchingUp("the store is being rebuilt or stopped") from None
        return max(found, key=lambda one: one[1].header.attempt, default=None)

    def ids(self) -> Iterator[str]:
        """Ids that `find` may find something under. Raises StoreCatchingUp, also in the middle."""
        for partition in list(self._partitions.values()):
            after = b""
            while page := self._page(partition, after):
                yield from (state.key.rollout_id for state in page if not state.key.choice)
                after = keys.attempt_key(page[-1].key, page[-1].header.attempt)

    def rows(self, number: int, state: AttemptState) -> RouteArray:
        """All rows of an attempt, [rows, layers, top_k]. Raises RouteError."""
        assert state.end is not None
        view = View(self._partitions[number])
        try:
            pieces = list(rows_of(view, view.plan(state, 0, state.end.rows)))
        except EnvClosed:
            raise StoreCatchingUp("the store is being rebuilt or stopped") from None
        return np.concatenate(pieces) if pieces else np.empty((0, 0, 0), np.uint8)

    def fused(self, number: int, state: AttemptState, max_model_len: int, shared_experts: int) -> RouteArray:
        """As FastDeploy has it: [layers, max_model_len, top_k]; 0: as long as it is.

        Raises:
            RouteError: as `rows`.  InvalidInput: it is longer, or FastDeploy has no type for so many experts.
        """
        rows = self.rows(number, state)
        experts = state.shape.num_experts if state.shape else 1
        return to_fastdeploy(rows, experts, max_model_len or len(rows), shared_experts)

    def _page(self, partition: Partition, after: bytes) -> list[AttemptState]:
        self._check()
        try:
            return View(partition).page(self.run, None, after, _PAGE)
        except EnvClosed:
            raise StoreCatchingUp("the store is being rebuilt or stopped") from None

    def _check(self) -> None:
        reason = self._progress.unready()
        if reason is not None:
            raise StoreCatchingUp(reason)
