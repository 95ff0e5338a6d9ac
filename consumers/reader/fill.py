"""Ids for rows that were not recorded. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moebus.schemas.dtypes import RouteArray


def fill_rows(routes: RouteArray, rows: npt.NDArray[np.intp], num_experts: int) -> None:
    """Writes legal ids into `routes[rows]` ([.., layers, top_k], in place): distinct within a top-k, and over all of
    these rows each expert as often as any other, give or take one, in every layer. A router that replays them has no
    expert that is overrun and none that gets nothing."""
    top_k = routes.shape[2]
    first = np.arange(len(rows), dtype=np.int64)[:, None] * top_k
    ids = (first + np.arange(top_k, dtype=np.int64)) % num_experts
    routes[rows] = ids[:, None, :].astype(routes.dtype)
