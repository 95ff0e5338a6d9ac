"""`RoutingPublisher.publish_response`: an answer of another engine's server in, one receipt a choice out."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy.typing as npt

from moebus.engine.answers.decoded import DecodedRoutes
from moebus.engine.answers.payload import Layers
from moebus.observability.clock import SystemClock
from moebus.producers.routing.receipt import RoutingReceipt, Stored
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Status
from moebus.schemas.rollout import check_choice
from moebus.schemas.route_ref import RouteRef

_HOME = {name: f"moebus.engine.{name}.routes" for name in ("fastdeploy", "sglang", "vllm")}


class ResponseReceipts(tuple[RoutingReceipt, ...]):
    """The receipts of an answer's choices, in their order there. `result` and `await` wait for all of them."""

    __slots__ = ()

    @property
    def refs(self) -> list[RouteRef]:
        """What travels with the samples, known at once."""
        return [receipt.ref for receipt in self]

    @property
    def ref(self) -> RouteRef:
        """The one of an answer with one choice.

        Raises:
            InvalidInput: field `choices`, where there are several.
        """
        if len(self) != 1:
            raise InvalidInput("choices", f"{len(self)} in this answer; use refs")
        return self[0].ref

    def done(self) -> bool:
        """True once every outcome is known."""
        return all(receipt.done() for receipt in self)

    def result(self, timeout: float | None = None) -> tuple[Stored, ...]:
        """The outcomes; waits up to `timeout` seconds in all. Raises as `RoutingReceipt.result`, for the first that did
        not get through."""
        clock = SystemClock()
        deadline = None if timeout is None else clock.monotonic() + timeout
        return tuple(one.result(None if deadline is None else max(0.0, deadline - clock.monotonic())) for one in self)

    def __await__(self) -> Generator[Any, None, tuple[Stored, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[Stored, ...]:
        return tuple(await asyncio.gather(*(_outcome(receipt) for receipt in self)))


async def _outcome(receipt: RoutingReceipt) -> Stored:
    return await receipt


@dataclass(frozen=True, slots=True)
class Answer:
    """The arguments of `publish_response` that are about the answer."""

    engine: str
    response: object
    rollout_id: str | None = None
    choice: int | None = None
    start: int = 0
    base: RouteRef | None = None
    prompt_token_ids: npt.ArrayLike | None = None
    versions: Sequence[tuple[int, str]] | None = None
    status: Status | None = None
    layers: Layers | None = None


class _Decode(Protocol):
    def __call__(self, response: object, card: ModelCard, start: int, **rest: Any) -> list[DecodedRoutes]: ...


def submissions(answer: Answer, card: ModelCard) -> list[dict[str, Any]]:
    """The arguments of `submit` for each choice. Nothing is sent unless all of the answer is right.

    Raises:
        InvalidInput: naming the argument, or the field of the answer.
    """
    if answer.engine not in _HOME:
        raise InvalidInput("engine", f"{answer.engine!r} is unknown; known are {', '.join(_HOME)}")
    module = import_module(_HOME[answer.engine])
    rollout_id = answer.rollout_id
    if rollout_id is None and answer.engine == "fastdeploy":
        rollout_id = module.rollout_id_of(answer.response)
    if rollout_id is None:
        raise InvalidInput("rollout_id", f"needed: {answer.engine} does not send one back")
    decode: _Decode = module.decode_routes
    rest: dict[str, Any] = {} if answer.layers is None else {"layers": answer.layers}
    found = decode(answer.response, card, answer.start, prompt_token_ids=answer.prompt_token_ids, **rest)
    if answer.choice is not None and len(found) != 1:
        raise InvalidInput("choice", f"{answer.choice}, but the answer has {len(found)} choices with their own numbers")
    number = None if answer.choice is None else check_choice(answer.choice)
    return [{"rollout_id": rollout_id, **_one(one, answer, number)} for one in found]


def _one(one: DecodedRoutes, answer: Answer, choice: int | None) -> dict[str, Any]:
    known: dict[str, Any] = {
        "choice": one.choice if choice is None else choice,
        "finish_reason": one.finish_reason,
        "status": one.status if answer.status is None or one.status == "missing" else answer.status,
    }
    if one.status in ("missing", "aborted") and not len(one.routes):  # nothing that could go on from a base
        return {"routes": None if known["status"] == "missing" else one.routes, **known}
    first = one.first_recorded
    if first > one.start and answer.base is None:
        why = (
            f"rows {one.start} to {first - 1} were not recorded, they came out of a cache: name the base that has them"
        )
        raise InvalidInput(one.path, why)
    if answer.base is not None and one.token_ids is None:
        raise InvalidInput("prompt_token_ids", "needed with a base, and the answer has not all token ids")
    return {
        "routes": one.routes[first - one.start :],
        "start": first,
        "base": answer.base,
        "token_ids": one.token_ids,
        "prompt_rows": None if one.prompt_rows is None else min(one.prompt_rows, one.rows),
        "versions": one.versions if answer.versions is None else answer.versions,
        **known,
    }
