"""A batch in the layouts that trainers already know, one array for each rollout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moebus.schemas.dtypes import RouteArray, fill_value
from moebus.schemas.errors import InvalidInput
from moebus.schemas.layouts import Ids, to_all_layers, to_fastdeploy, to_sglang, to_slime, to_verl


class Exports:
    """`RouteBatch.export`. A rollout of N tokens has N - 1 rows that matter: its last token was never forwarded.

    Build the batch with `resolve(refs, tokens)`: N is the number of tokens that was given. Without them the recorded
    rows are all but the last.
    """

    def __init__(
        self,
        routes: RouteArray,
        valid: npt.NDArray[np.bool_],
        bounds: npt.NDArray[np.int32],
        layers: tuple[int, ...],
        num_experts: int,
        from_tokens: bool,
        absent: frozenset[int],
    ) -> None:
        """The fields of the batch. `absent`: indexes of the rollouts without routes."""
        self._layers = layers
        self._experts = num_experts
        self._all = [(routes[low:high], valid[low:high]) for low, high in pairwise(bounds.tolist())]
        self._from_tokens = from_tokens
        self._absent = absent

    def fastdeploy(self, max_model_len: int, shared_experts: int = 0) -> list[RouteArray]:
        """Fused: [moe_layers, max_model_len, top_k] each, uint8, uint16 or uint32 as FastDeploy chooses, all ones
        where nothing was recorded.

        Raises:
            InvalidInput: field `max_model_len`, where a rollout has more rows.
        """
        exported = []
        for rows, valid in self._all:
            there = np.flatnonzero(valid)
            last = int(there[-1]) + 1 if len(there) else 0  # a last token without routes takes no place
            padded = to_fastdeploy(rows[:last], self._experts, max_model_len, shared_experts)
            padded[:, :last][:, ~valid[:last]] = fill_value(padded.dtype)
            exported.append(padded)
        return exported

    def fastdeploy_layers(self, max_model_len: int, shared_experts: int = 0) -> list[list[RouteArray]]:
        """Per layer: a list of [max_model_len, top_k] for each rollout, index 0 the first MoE layer."""
        return [list(fused) for fused in self.fastdeploy(max_model_len, shared_experts)]

    def sglang(self, num_hidden_layers: int) -> list[str]:
        """base64 of little-endian int32 [N - 1, num_hidden_layers, top_k], zeros in layers that do not route."""
        return [to_sglang(rows, self._layers, num_hidden_layers) for rows in self._forwarded()]

    def slime(self, num_hidden_layers: int | None = None) -> list[npt.NDArray[np.int32]]:
        """int32 [N - 1, layers, top_k]; miles takes the same. `num_hidden_layers`: all layers by global number,
        zeros in those that do not route (default: MoE layers only)."""
        return [to_slime(self._wide(rows, num_hidden_layers)) for rows in self._forwarded()]

    miles = slime

    def verl(self, num_hidden_layers: int | None = None) -> list[npt.NDArray[np.int16]]:
        """int16 [N, layers, top_k], the last row zeros. `num_hidden_layers` as for `slime`.

        Raises:
            InvalidInput: field `num_experts`, where there are more than 32,768.
        """
        return [to_verl(self._wide(rows, num_hidden_layers), self._experts) for rows in self._forwarded()]

    def _forwarded(self) -> list[RouteArray]:
        """All rows but that of the last token. Other rows without routes keep their legal ids; they are for tokens that
        a trainer masks.

        Raises:
            InvalidInput: field `refs`, an absent rollout.
        """
        for index in sorted(self._absent):
            raise InvalidInput("refs", f"rollout {index} of the batch is absent; leave it out to export the others")
        return [rows[:-1] if self._from_tokens else rows for rows, _ in self._all]

    def _wide(self, rows: RouteArray, num_hidden_layers: int | None) -> Ids:
        return rows if num_hidden_layers is None else to_all_layers(rows, self._layers, num_hidden_layers)
