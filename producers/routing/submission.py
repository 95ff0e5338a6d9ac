"""What a call of `submit` means: the cheap checks, and the rows that a base spares. Pure; it copies no rows.

Whether an expert is twice in a top-k costs more than the copy, so it is looked at where the rows are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from moebus.schemas.attempt import attempt_text, parse_attempt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Base, Header, Outcome, Status, Versions
from moebus.schemas.rollout import check_group, default_group, partition_key, rollout_key
from moebus.schemas.route_ref import RouteRef, token_hash

BASE_MAX_AGE_MS = 20 * 3600 * 1000
"""A base older than this is not used: its END may leave the topic (48 h) before a store has to be rebuilt."""
OVERHEAD_BYTES = 1024
"""What a submission costs beside its array, so that a bound in bytes also bounds many empty ones."""
STATUSES: tuple[Status, ...] = ("complete", "partial", "aborted", "missing")


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt, checked. `rows`: its own rows [n, layers, top_k] in the caller's memory and type, ids below the
    card's expert count. `base_refused`: a base was given and could not be used, so everything is sent."""

    rows: npt.NDArray[np.integer]
    card: ModelCard
    header: Header
    outcome: Outcome
    versions: Versions
    ref: RouteRef
    base_refused: bool

    @property
    def nbytes(self) -> int:
        """What it counts for in the bound."""
        return self.rows.size * self.card.dtype.itemsize + OVERHEAD_BYTES

    @property
    def name(self) -> str:
        """`run/id#choice attempt`, for people."""
        return f"{self.header.key} attempt {self.ref.attempt}"


def plan(
    routes: npt.ArrayLike | None,
    rollout_id: str,
    *,
    run: str,
    card: ModelCard,
    epoch: int,
    attempt: bytes,
    now_ms: int,
    choice: int = 0,
    group: str | None = None,
    start: int = 0,
    base: RouteRef | None = None,
    token_ids: npt.ArrayLike | None = None,
    prompt_rows: int | None = None,
    versions: Sequence[tuple[int, str]] = (),
    status: Status = "complete",
    finish_reason: str = "",
) -> Submission:
    """Checks the arguments of `RoutingPublisher.submit` and cuts out the rows to send, without a copy.

    Raises:
        InvalidInput: naming the argument.
    """
    key = rollout_key(run, rollout_id, choice)
    group = default_group(rollout_id) if group is None else check_group(group)
    typed = _routes(routes, card, status)
    rows = _start(start, base) + len(typed)
    tokens = _tokens(token_ids, rows)
    used = _usable_base(base, run, group, tokens, rows, now_ms)
    own = used.rows if used else 0
    if start > own:
        raise InvalidInput("start", f"{start}, but the base gives {own} rows: send the rows from {own} on, or all")
    hashes = _hashes(tokens, rows, prompt_rows)
    header = Header.of(key, attempt, group=group, epoch=epoch, base=used)
    ref = RouteRef(run, rollout_id, choice, attempt_text(attempt), rows, group, hashes[0], prompt_rows, hashes[1])
    return Submission(
        rows=typed[own - start :],
        card=card,
        header=header,
        outcome=Outcome(status, finish_reason, hashes[0], prompt_rows, hashes[1]),
        versions=_versions(versions, own, rows),
        ref=ref,
        base_refused=base is not None and used is None,
    )


def sampled(run: str, group: str, share: float) -> bool:
    """Whether a group is among the `share` (0 to 1) that is sent: by its name, so that every publisher agrees and all
    turns and samples that go on from each other are in or out together."""
    return share >= 1 or xxhash.xxh3_64_intdigest(partition_key(run, group)) < share * 2**64


def _routes(routes: npt.ArrayLike | None, card: ModelCard, status: Status) -> npt.NDArray[np.integer]:
    if status not in STATUSES:
        raise InvalidInput("status", f"{status!r} is unknown; known are {', '.join(STATUSES)}")
    if routes is None:
        if status != "missing":
            raise InvalidInput("routes", "none given; only a rollout of status missing has none")
        return np.empty(card.shape(0), card.dtype)
    found = np.asarray(routes)
    _check_shape(found, card)
    _check_range(found, card.num_experts)
    if status == "missing" and len(found):
        raise InvalidInput("routes", f"{len(found)} rows of a rollout of status missing")
    return found


def _check_shape(routes: npt.NDArray[np.integer], card: ModelCard) -> None:
    if routes.ndim != 3 or routes.shape[1:] != card.shape(0)[1:]:
        want = f"[rows, {len(card.moe_layers)}, {card.top_k}]"
        raise InvalidInput("routes", f"shape {list(routes.shape)} where the model card says {want}")
    if routes.dtype.kind not in "iu":
        raise InvalidInput("routes", f"integers are needed, not {routes.dtype}")


def _check_range(routes: npt.NDArray[np.integer], num_experts: int) -> None:
    """Before any cast, which would wrap. Types that hold nothing else are not read."""
    if not routes.size:
        return
    info = np.iinfo(routes.dtype)
    if info.min < 0 and (lowest := int(routes.min())) < 0:
        raise InvalidInput("routes", f"expert id {lowest}; leave out rows that were not recorded")
    if info.max >= num_experts and (highest := int(routes.max())) >= num_experts:
        raise InvalidInput("routes", f"expert id {highest} where there are {num_experts} experts")


def _start(start: int, base: RouteRef | None) -> int:
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise InvalidInput("start", f"{start!r} is not an integer of at least 0")
    if start and base is None:
        raise InvalidInput("start", f"{start} without a base: the rows before it would be missing")
    return start


def _tokens(token_ids: npt.ArrayLike | None, rows: int) -> npt.NDArray[np.integer] | None:
    if token_ids is None:
        return None
    tokens: npt.NDArray[np.integer] = np.asarray(token_ids)
    token_hash(tokens[:0])  # checks the type and the shape
    if len(tokens) < rows:
        raise InvalidInput("token_ids", f"{len(tokens)} tokens for {rows} rows; each row belongs to one token")
    return tokens


def _hashes(
    tokens: npt.NDArray[np.integer] | None, rows: int, prompt_rows: int | None
) -> tuple[str | None, str | None]:
    if prompt_rows is not None and not 0 <= prompt_rows <= rows:
        raise InvalidInput("prompt_rows", f"{prompt_rows} of {rows} rows")
    if tokens is None:
        return None, None
    return token_hash(tokens[:rows]), None if prompt_rows is None else token_hash(tokens[:prompt_rows])


def _usable_base(
    base: RouteRef | None, run: str, group: str, tokens: npt.NDArray[np.integer] | None, rows: int, now_ms: int
) -> Base | None:
    """All rows of the base where its tokens begin ours, else its prompt rows, else None: everything is sent."""
    if base is None:
        return None
    if base.run != run or base.effective_group != group:
        raise InvalidInput("base", f"{base.run}/{base.effective_group} is another run or group than {run}/{group}")
    if tokens is None:
        raise InvalidInput("token_ids", "needed with a base, to check that its tokens begin this rollout's")
    attempt = parse_attempt(base.attempt)
    if now_ms - int.from_bytes(attempt[:6], "big") > BASE_MAX_AGE_MS:
        return None
    for count, known in ((base.rows, base.token_hash), (base.prompt_rows or 0, base.prompt_hash)):
        if known is not None and 1 <= count <= rows and token_hash(tokens[:count]) == known:
            return Base(attempt, count, base.rollout_id, base.choice, known)
    return None


def _versions(versions: Sequence[tuple[int, str]], own: int, rows: int) -> Versions:
    """Absolute rows; ranges past the last row say nothing and are left out."""
    checked: list[tuple[int, str]] = []
    for entry in versions:
        row, version = entry
        if not isinstance(row, int) or isinstance(row, bool) or not isinstance(version, str):
            raise InvalidInput("versions", f"{entry!r} is not a pair of a row and a version")
        if row < 0 or (checked and row <= checked[-1][0]):
            raise InvalidInput("versions", f"row {row} does not come after the one before it")
        checked.append((row, version))
    if checked and checked[0][0] > own:
        raise InvalidInput("versions", f"the first range starts at row {checked[0][0]}, the rows at {own}")
    return tuple(entry for entry in checked if entry[0] < rows)
