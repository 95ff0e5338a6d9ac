"""transfer_weights as SGLang's calls: a group, a session, tensors by NCCL, CUDA IPC or a checkpoint engine, a label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from moebus.engine.port import Deadline, EngineFailed, EngineRefused, Unsupported
from moebus.engine.sglang.api import Api

_BY_FIELD = {
    "names": "/update_weights_from_distributed",
    "serialized_named_tensors": "/update_weights_from_tensor",
    "zmq_handles": "/update_weights_from_ipc",
}
_OURS = {"flush_cache": "cache", "abort_all_requests": "a pause", "weight_version": "version"}
"""Fields of SGLang that the command says in its own words."""
_STEPS = ("init", "start", "update", "finish")


class Transfer:
    """`plan` refuses what cannot be done before anything is."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def plan(self, step: str, version: str | None, info: Mapping[str, object]) -> Callable[[Deadline], None]:
        """What to call for one step.

        Raises:
            EngineRefused: a step that does not exist; `info` lacks or misuses a field.
        """
        if step not in _STEPS:
            raise EngineRefused(f"step: there is no {step!r}; there are {', '.join(_STEPS)}")
        for name, word in _OURS.items():
            if name in info:
                raise EngineRefused(f"info.{name}: it is set by {word}; leave it out")
        if step == "init":
            return lambda deadline: self._init(info, deadline)
        if step == "start":
            return lambda deadline: self._session("/begin_weight_update", info, deadline)
        if step == "finish":
            if not version:
                raise EngineRefused("version: finish needs the name of the new weights")
            return lambda deadline: self._finish(version, info, deadline)
        path = next((path for name, path in _BY_FIELD.items() if name in info), None)
        if path is None:
            raise EngineRefused(f"info: one of {', '.join(_BY_FIELD)} is needed to say how the tensors come")
        return lambda deadline: self._update(path, info, deadline)

    def end_stale(self, deadline: Deadline) -> None:
        """Ends a session that was left open; what it says is of weights that nobody will use."""
        with suppress(EngineFailed, EngineRefused):
            self._session("/end_weight_update", {}, deadline)

    def _init(self, info: Mapping[str, object], deadline: Deadline) -> None:
        """Nothing to do where tensors come without a group."""
        if info:
            self._api.post("/init_weights_update_group", info, deadline)

    def _update(self, path: str, info: Mapping[str, object], deadline: Deadline) -> None:
        self._api.post(path, {**info, "flush_cache": False}, deadline)

    def _session(self, path: str, info: Mapping[str, object], deadline: Deadline) -> None:
        """A server before sessions (sglang#28001) has no such path and needs none."""
        try:
            self._api.post(path, {"selector": info.get("selector", "all")} if "begin" in path else {}, deadline)
        except Unsupported:
            return

    def _finish(self, version: str, info: Mapping[str, object], deadline: Deadline) -> None:
        self._session("/end_weight_update", info, deadline)
        if group := info.get("destroy_group"):
            self._api.post("/destroy_weights_update_group", {"group_name": group}, deadline)
        self._api.post("/update_weight_version", {"new_version": version, "abort_all_requests": False}, deadline)
