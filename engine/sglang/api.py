"""SGLang's own calls, as typed values. Paths, fields and versions: docs/engines/sglang.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moebus.engine.http import EngineServer, Reply
from moebus.engine.port import Deadline, EngineFailed, Unsupported
from moebus.schemas.tags import Tag

NAMES = {Tag.WEIGHT: "weights", Tag.KV_CACHE: "kv_cache"}
SAVER = "--enable-memory-saver"
_USAGE = {Tag.WEIGHT: "weight", Tag.KV_CACHE: "kvcache"}
_GIB = 1 << 30
PATIENT_S = 5.0
LOOK_S = 0.3
"""Three looks make an inspection, which has 1 s."""


@dataclass(frozen=True, slots=True)
class Info:
    """What `/server_info` says. `boot` changes with every start, None where the server does not tell; `sizes`: bytes
    by tag as measured when the model was loaded (they do not change while a tag sleeps)."""

    boot: str | None
    model_path: str
    memory_saver: bool
    cpu_backup: bool
    tokenizers: int
    sizes: Mapping[Tag, int]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at the schedulers, all data-parallel ranks together. `tokens`: that they hold."""

    running: int
    waiting: int
    tokens: int

    @property
    def all(self) -> int:
        return self.running + self.waiting


class Api:
    """Raises what `EngineServer` raises; an answer of an unknown shape is EngineFailed."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    def info(self, within: float = PATIENT_S) -> Info:
        found = _object(self._server.look("/server_info", within), "/server_info")
        states = found.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        usage = state.get("memory_usage")
        sizes = {
            tag: int(usage[name] * _GIB)
            for tag, name in _USAGE.items()
            if isinstance(usage, dict) and isinstance(usage.get(name), (int, float))
        }
        start = [state.get("startup_time"), found.get("random_seed")]
        workers = found.get("tokenizer_worker_num", 1)
        return Info(
            boot="-".join(str(one) for one in start if one is not None) or None,
            model_path=str(found.get("model_path", "")),
            memory_saver=found.get("enable_memory_saver") is True,
            cpu_backup=found.get("enable_weights_cpu_backup") is True,
            tokenizers=workers if isinstance(workers, int) else 1,
            sizes=sizes,
        )

    def load(self, within: float = PATIENT_S) -> Load:
        """`/v1/loads`, on servers before it `/get_load`."""
        try:
            reply = self._server.look("/v1/loads", within, params={"include": "core"})
            ranks = _object(reply, "/v1/loads").get("loads")
            waiting, running = "num_waiting_reqs", "num_running_reqs"
        except Unsupported:
            ranks = self._server.look("/get_load", within).body
            waiting, running = "num_waiting_reqs", "num_reqs"
        if not isinstance(ranks, list) or not ranks or not all(isinstance(one, dict) for one in ranks):
            raise EngineFailed("/v1/loads: an answer without the load of any scheduler")
        held = sum(_count(one, waiting) for one in ranks)
        total = sum(_count(one, running) for one in ranks)
        tokens = sum(_count(one, "num_used_tokens") + _count(one, "num_tokens") for one in ranks)
        return Load(total if running == "num_running_reqs" else total - held, held, tokens)

    def weight_version(self, within: float = PATIENT_S) -> str | None:
        """The label that the server gives its weights; `default` until one is set."""
        label = _object(self._server.look("/model_info", within), "/model_info").get("weight_version")
        return label if isinstance(label, str) else None

    def post(self, path: str, body: Mapping[str, Any], deadline: Deadline, needs: str = "") -> Reply:
        return self._server.call("POST", path, deadline, json=dict(body), needs=needs)

    def pause(self, mode: str, deadline: Deadline) -> None:
        self.post("/pause_generation", {"mode": mode}, deadline)

    def resume(self, deadline: Deadline) -> None:
        self.post("/continue_generation", {}, deadline)

    def abort(self, name: str | None, deadline: Deadline) -> None:
        """None: everything."""
        self.post("/abort_request", {"abort_all": True} if name is None else {"rid": name}, deadline)

    def release(self, tag: Tag, deadline: Deadline) -> None:
        self.post("/release_memory_occupation", {"tags": [NAMES[tag]]}, deadline, SAVER)

    def take_back(self, tag: Tag, deadline: Deadline) -> None:
        self.post("/resume_memory_occupation", {"tags": [NAMES[tag]]}, deadline, SAVER)

    def flush(self, deadline: Deadline) -> None:
        self.post("/flush_cache", {}, deadline)


def _object(reply: Reply, path: str) -> dict[str, Any]:
    if not isinstance(reply.body, dict):
        raise EngineFailed(f"{path}: an answer that is no JSON object; is this an SGLang server?")
    return reply.body


def _count(rank: Mapping[str, Any], name: str) -> int:
    value = rank.get(name, 0)
    return value if isinstance(value, int) else 0
