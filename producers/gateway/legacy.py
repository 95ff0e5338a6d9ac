"""FastDeploy's legacy paths: over the log, or by the signals in shared memory of this host."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from moebus.engine.legacy_signals import TIMEOUT_SECONDS, LegacyAnswer, LegacySignals
from moebus.producers.gateway.backend import Backend
from moebus.producers.gateway.bodies import Body, LegacyBody
from moebus.producers.gateway.fastdeploy import WAKEUP_SECONDS, command, sleep_args, wakeup_args
from moebus.producers.gateway.idempotency import Caller, Identity
from moebus.producers.gateway.strict import no_body, only
from moebus.schemas.control_args import Method
from moebus.schemas.errors import SettingsError

VARIABLE = "FD_ENABLE_V1_UPDATE_WEIGHTS"
DISABLED = "Dynamic Load Weight Disabled."
Verb = Literal["clear", "update"]
_STATUSES: dict[int | str, dict[str, Any]] = {
    404: {"model": Body, "description": "Not switched on, or not done in time"},
}


@dataclass(frozen=True, slots=True)
class Legacy:
    """`over_log`: they are sleep and wakeup of the fleet. Else `suffixes` name the signals of engines of this host (the
    ports of their worker queues); none: the paths are switched off. `timeout` in seconds."""

    over_log: bool = False
    suffixes: tuple[str, ...] = ()
    timeout: float = TIMEOUT_SECONDS


def legacy_mode(environment: Mapping[str, str]) -> bool:
    """Whether the legacy paths work over the log: FastDeploy's own variable, 0 where it is not set.

    Raises:
        SettingsError: neither 0 nor 1.
    """
    text = environment.get(VARIABLE, "0").strip() or "0"
    if text not in ("0", "1"):
        raise SettingsError(f"{VARIABLE}: 0 or 1 is needed, not {text[:40]!r}")
    return text == "1"


def legacy_router(backend: Backend, legacy: Legacy) -> APIRouter:
    """The two paths."""
    pages = APIRouter(tags=["FastDeploy, legacy"], responses=_STATUSES)
    plain = [Depends(only()), Depends(no_body)]

    @pages.get("/clear_load_weight", response_model=LegacyBody, dependencies=plain)
    async def clear_load_weight(caller: Caller) -> JSONResponse:
        """Frees weights and KV cache."""
        return await _answer(backend, legacy, caller, "clear")

    @pages.get("/update_model_weight", response_model=LegacyBody, dependencies=plain)
    async def update_model_weight(caller: Caller) -> JSONResponse:
        """Loads weights again, allocates the KV cache, and resumes."""
        return await _answer(backend, legacy, caller, "update")

    return pages


async def _answer(backend: Backend, legacy: Legacy, caller: Identity, verb: Verb) -> JSONResponse:
    if legacy.over_log:
        if verb == "clear":
            body, status = await command(backend, caller, Method.SLEEP, sleep_args(None))
        else:
            body, status = await command(backend, caller, Method.WAKEUP, wakeup_args(None), WAKEUP_SECONDS)
        text = body["error_message"] or f"{verb} model weight successfully"
        return JSONResponse({**body, "msg": text}, status)
    if not legacy.suffixes:
        return _signals_body(LegacyAnswer(404, DISABLED, "no suffix of an engine of this host is set"), {})
    answers = await backend.operations.run(lambda: by_signals(legacy, verb))
    worst = max(answers.values(), key=lambda answer: answer.status)
    return _signals_body(worst, answers)


def by_signals(legacy: Legacy, verb: Verb) -> dict[str, LegacyAnswer]:
    """Clears or updates the engines of all suffixes side by side; answers by suffix."""

    def one(suffix: str) -> LegacyAnswer:
        signals = LegacySignals(suffix)
        return signals.clear(legacy.timeout) if verb == "clear" else signals.update(legacy.timeout)

    with ThreadPoolExecutor(len(legacy.suffixes), thread_name_prefix="moebus-legacy") as pool:
        return dict(zip(legacy.suffixes, pool.map(one, legacy.suffixes), strict=True))


def _signals_body(answer: LegacyAnswer, answers: Mapping[str, LegacyAnswer]) -> JSONResponse:
    good = answer.status == 200
    body = LegacyBody(
        status="success" if good else "error",
        result={suffix: {"status": one.status, "msg": one.msg} for suffix, one in answers.items()} or None,
        error=None if good else "legacy",
        error_message=None if good else answer.detail or answer.msg,
        msg=answer.msg,
    )
    return JSONResponse(body.model_dump(mode="json"), answer.status)
