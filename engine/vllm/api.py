"""vLLM's HTTP calls that an adapter needs, one method each (docs/engines/vllm.md has the table).

Read from vLLM's public sources: `vllm/entrypoints/serve/dev/{rlhf,sleep,cache,rpc,server_info}/api_router.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moebus.engine.http import EngineServer
from moebus.engine.port import Deadline, EngineFailed, EngineRefused, Level, PauseMode, Unsupported
from moebus.engine.vllm.metrics import Gauges, read_gauges
from moebus.schemas.tags import Tag

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
SLEEP_MODE = "--enable-sleep-mode"
TRANSFER = '--weight-transfer-config \'{"backend": "nccl"}\''
TAG_WORDS: Mapping[Tag, str] = {Tag.WEIGHT: "weights", Tag.KV_CACHE: "kv_cache"}
READ_S = 5.0
"""How long the state is waited for after a call; `inspect` has less time."""
LEVEL_NUMBERS: Mapping[Level, int] = {"offload": 1, "discard": 2}


class VllmApi:
    """Raises as EngineServer does; looks raise EngineUnreachable."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    # -- looks

    def gauges(self, within: float = READ_S) -> Gauges:
        """What `/metrics` says, all None where it says nothing."""
        return read_gauges(self._server.look("/metrics", within).text)

    def is_paused(self, within: float = READ_S) -> bool:
        return self._flag("/is_paused", "is_paused", within)

    def is_sleeping(self, within: float = READ_S) -> bool:
        """True also while the server is only paused; False proves that nothing sleeps."""
        return self._flag("/is_sleeping", "is_sleeping", within)

    def version(self, within: float = READ_S) -> str | None:
        """Label of the weights; None where the server is too old to have one."""
        try:
            label = self._server.look("/weight_info", within).field("weight_version")
        except Unsupported:
            return None
        return label if isinstance(label, str) else None

    def sleep_enabled(self, deadline: Deadline) -> bool | None:
        """Whether it was started with sleep mode; None where it does not say. The first answer may take seconds."""
        try:
            reply = self._server.call("GET", "/server_info", deadline, params={"config_format": "json"})
        except (Unsupported, EngineFailed, EngineRefused):
            return None
        return _sleep_mode(reply.field("vllm_config"))

    def own_model(self, deadline: Deadline) -> str:
        """Where the server took its weights from at its start: a path or a name in its hub.

        Raises:
            EngineRefused: it does not say.
        """
        found = self._server.call("GET", "/v1/models", deadline).field("data")
        first = found[0] if isinstance(found, list) and found else None  # adapters (LoRA) come behind it
        root = first.get("root") if isinstance(first, dict) else None
        if not isinstance(root, str) or not root:
            raise EngineRefused("source: the server does not say where its own weights came from; name a source")
        return root

    # -- effects

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        params = {"mode": mode, "clear_cache": "false"}
        self._server.call("POST", "/pause", deadline, params=params, needs=DEV_MODE)

    def resume(self, deadline: Deadline) -> None:
        self._server.call("POST", "/resume", deadline, needs=DEV_MODE)

    def sleep(self, level: Level, deadline: Deadline) -> None:
        params = {"level": LEVEL_NUMBERS[level], "mode": "abort"}
        self._server.call("POST", "/sleep", deadline, params=params, needs=f"{DEV_MODE} and {SLEEP_MODE}")

    def wake_up(self, tag: Tag, deadline: Deadline, on_sent: Callable[[], None]) -> None:
        params = {"tags": TAG_WORDS[tag]}
        needs = f"{DEV_MODE} and {SLEEP_MODE}"
        self._server.call("POST", "/wake_up", deadline, params=params, needs=needs, on_sent=on_sent)

    def reset_cache(self, deadline: Deadline) -> None:
        """Requests inside are computed again: with their blocks in place the server drops nothing, and says 200."""
        params = {"reset_running_requests": "true", "reset_external": "true"}
        self._server.call("POST", "/reset_prefix_cache", deadline, params=params, needs=DEV_MODE)

    def abort(self, ids: Sequence[str] | None, deadline: Deadline) -> int:
        """None: all. An empty list means all to the server too, so it is never sent. Returns the server's count."""
        body = {} if ids is None else {"request_ids": list(ids)}
        count = self._server.call("POST", "/abort_requests", deadline, json=body, needs=DEV_MODE).field("aborted")
        return count if isinstance(count, int) else 0

    def label(self, version: str, deadline: Deadline) -> bool:
        """Names the weights; False where the server is too old for it."""
        try:
            self._server.call("POST", "/update_weight_version", deadline, json={"new_version": version})
        except Unsupported:
            return False
        return True

    def reload(self, path: str, deadline: Deadline) -> None:
        """Loads weights in place. `path` is always named: without one the server takes the last one it was given."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._server.call("POST", "/collective_rpc", deadline, json=body, needs=DEV_MODE)

    def transfer(self, path: str, body: Mapping[str, Any] | None, deadline: Deadline) -> None:
        self._server.call("POST", path, deadline, json=body, needs=f"{DEV_MODE} and {TRANSFER}")

    def _flag(self, path: str, name: str, within: float) -> bool:
        value = self._server.look(path, within, needs=DEV_MODE).field(name)
        if not isinstance(value, bool):
            raise EngineFailed(f"{path}: the answer has no {name}; is this a vLLM server?")
        return value


def _sleep_mode(config: object) -> bool | None:
    model = config.get("model_config") if isinstance(config, dict) else None
    value = model.get("enable_sleep_mode") if isinstance(model, dict) else None
    return value if isinstance(value, bool) else None
