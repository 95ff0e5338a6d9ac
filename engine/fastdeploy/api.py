"""FastDeploy's own control calls, as typed values. Paths, fields and versions: docs/engines/fastdeploy.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moebus.engine.http import EngineServer
from moebus.engine.port import Deadline, EngineFailed, EngineRefused, EngineUnknown, Unsupported
from moebus.schemas.errors import MoebusError

V1 = "FastDeploy 2.6 or newer, with --dynamic-load-weight and FD_ENABLE_V1_UPDATE_WEIGHTS=1"
LOOK_S = 0.4
PATIENT_S = 5.0


@dataclass(frozen=True, slots=True)
class Config:
    """What `/config-info` says; None where it does not. It may be served at another port (`--metrics-port`)."""

    dynamic: bool | None = None
    strategy: str | None = None


class Api:
    """Raises what `EngineServer` raises."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    def is_paused(self, within: float = PATIENT_S) -> bool:
        """It waits for a control call under way: EngineUnreachable where that takes longer than `within`."""
        found = self._server.look("/v1/is_paused", within).field("result")
        paused = found.get("is_paused") if isinstance(found, dict) else None
        if not isinstance(paused, bool):
            raise EngineFailed("/v1/is_paused: an answer without result.is_paused; is this a FastDeploy server?")
        return paused

    def greet(self, within: float) -> None:
        """A look, so that a server that is gone is noticed. Raises EngineUnreachable."""
        with suppress(EngineRefused, EngineFailed, Unsupported):
            self._server.look("/health", within)

    def config(self, within: float) -> Config:
        try:
            found = self._server.look("/config-info", within).field("load_config")
        except MoebusError:
            return Config()
        if not isinstance(found, dict):
            return Config()
        dynamic, strategy = found.get("dynamic_load_weight"), found.get("load_strategy")
        return Config(
            dynamic if isinstance(dynamic, bool) else None, strategy.lower() if isinstance(strategy, str) else None
        )

    def pause(self, deadline: Deadline) -> None:
        self._server.call("POST", "/v1/pause", deadline, needs=V1)

    def resume(self, deadline: Deadline) -> None:
        self._server.call("POST", "/v1/resume", deadline, needs=V1)

    def memory(self, method: str, tags: str, deadline: Deadline, on_sent: Callable[[], None] | None = None) -> None:
        """`sleep` or `wakeup`. Raises EngineUnknown: a 200 that no rank has a part in."""
        reply = self._server.call("POST", f"/v1/{method}", deadline, params={"tags": tags}, needs=V1, on_sent=on_sent)
        result = reply.field("result")
        if not isinstance(result, list) or not result:
            raise EngineUnknown(f"/v1/{method}: the server says success and names no rank that did it")

    def update(self, body: Mapping[str, Any], deadline: Deadline) -> list[dict[str, Any]]:
        """What each rank says of its update."""
        result = self._server.call("POST", "/v1/update_weights", deadline, json=dict(body), needs=V1).field("result")
        if not isinstance(result, list) or not result:
            raise EngineUnknown("/v1/update_weights: the server says success and names no rank that did it")
        return [one if isinstance(one, dict) else {} for one in result]

    def abort(self, ids: list[str] | None, deadline: Deadline) -> list[str] | None:
        """The ids that ran; None where the server does not say (since FastDeploy#7615)."""
        body: dict[str, Any] = {"abort_all": True} if ids is None else {"req_ids": ids}
        result = self._server.call("POST", "/v1/abort_requests", deadline, json=body, needs=V1).field("result")
        ended = result.get("aborted") if isinstance(result, dict) else None
        if not isinstance(ended, list):
            return None
        return [str(one["request_id"]) for one in ended if isinstance(one, dict) and "request_id" in one]
