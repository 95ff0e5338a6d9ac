"""Which rollout server answers at an address, and what it was not started with. Looks only; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import SecretStr

from moebus.engine.http import EngineServer
from moebus.engine.port import EngineRefused, EngineUnauthorized, EngineUnreachable
from moebus.schemas.errors import MoebusError

Kind = Literal["vllm", "sglang", "fastdeploy"]
LOOK_S = 3.0
_OWNERS: dict[str, Kind] = {"vllm": "vllm", "sglang": "sglang", "fastdeploy": "fastdeploy"}


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that a server cannot do. `launch`: the line that starts it with that. `serious`: commands of a worker
    fail without it; otherwise only some answer `unsupported`."""

    what: str
    launch: str
    serious: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """`notes`: what is as it should be, or cannot be told, one sentence each."""

    kind: Kind
    version: str | None
    lacks: tuple[Lack, ...]
    notes: tuple[str, ...] = ()


class NoServer(EngineRefused):
    """What answers, if anything, is none of the servers that moebus drives."""


def survey(url: str, token: SecretStr | None = None, within: float = LOOK_S) -> Survey:
    """Each look takes `within` seconds at most.

    Raises:
        EngineUnreachable: nothing answers.  EngineUnauthorized: the token.  NoServer.  InvalidInput: the URL.
    """
    server = EngineServer(url, token)
    try:
        return _Look(server, within).survey()
    finally:
        server.close()


class _Look:
    def __init__(self, server: EngineServer, within: float) -> None:
        self._server = server
        self._within = within

    def survey(self) -> Survey:
        info = self._get("/server_info", {"config_format": "json"})
        if "vllm_config" in info:
            return self._vllm(info)
        info = info if "internal_states" in info else self._get("/get_server_info")
        if "internal_states" in info:
            return _sglang(info)
        if self._get("/v1/is_paused").get("result") is not None:
            return _fastdeploy(self._get("/config-info"))
        kind = self._owner()
        if kind == "vllm":
            return self._vllm({})
        if kind == "fastdeploy":
            return Survey("fastdeploy", None, (Lack("/v1/is_paused", _launch_fastdeploy("FastDeploy 2.6"), True),))
        raise NoServer(f"{self._server.url} answers, and is neither vLLM nor SGLang nor FastDeploy")

    def _get(self, path: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object at `path`; empty where there is none."""
        try:
            body = self._server.look(path, self._within, params=params).body
        except (EngineUnreachable, EngineUnauthorized):
            raise
        except MoebusError:
            return {}
        return body if isinstance(body, dict) else {}

    def _owner(self) -> Kind | None:
        models = self._get("/v1/models").get("data")
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        return _OWNERS.get(str(first.get("owned_by", "")).lower())

    def _vllm(self, info: Mapping[str, Any]) -> Survey:
        told = self._get("/version").get("version")
        version = told if isinstance(told, str) else None
        if not info:
            lack = "dev mode: there is no /pause, /sleep or /update_weights"
            return Survey("vllm", version, (Lack(lack, "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL ...", True),))
        config = info["vllm_config"]
        model = config.get("model_config") if isinstance(config, dict) else None
        values = model if isinstance(model, dict) else {}
        return _told("vllm", version, values, _VLLM, "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL ... {flag}")


@dataclass(frozen=True, slots=True)
class _Flag:
    """A field that says whether a flag was given, and what is missing without it."""

    field: str
    flag: str
    lack: str
    serious: bool = False


_ROUTES = "routed experts in answers: there are no routes to publish"
_VLLM = (
    _Flag("enable_sleep_mode", "--enable-sleep-mode", "sleep mode: sleep and wakeup do nothing", True),
    _Flag(
        "enable_return_routed_experts",
        "--enable-return-routed-experts",
        _ROUTES,
    ),
)
_SGLANG = (
    _Flag("enable_memory_saver", "--enable-memory-saver", "the memory saver: sleep and wakeup are unsupported", True),
    _Flag(
        "enable_weights_cpu_backup", "--enable-weights-cpu-backup",
        "a host copy of the weights: they sleep with level discard only and are loaded again as they wake",
    ),
    _Flag(
        "enable_return_routed_experts", "--enable-return-routed-experts", _ROUTES
    ),
)  # fmt: skip


def _told(kind: Kind, version: str | None, values: Mapping[str, Any], flags: tuple[_Flag, ...], launch: str) -> Survey:
    lacks = [
        Lack(flag.lack, launch.format(flag=flag.flag), flag.serious)
        for flag in flags
        if values.get(flag.field) is False
    ]
    notes = [f"{flag.flag} is on" for flag in flags if values.get(flag.field) is True]
    notes += [f"whether {flag.flag} is on it does not tell" for flag in flags if flag.field not in values]
    return Survey(kind, version, tuple(lacks), tuple(notes))


def _sglang(info: Mapping[str, Any]) -> Survey:
    version = info.get("version")
    launch = f"python -m sglang.launch_server --model-path {info.get('model_path', 'MODEL')} ... {{flag}}"
    found = _told("sglang", version if isinstance(version, str) else None, info, _SGLANG, launch)
    workers = info.get("tokenizer_worker_num")
    if isinstance(workers, int) and workers > 1:
        note = f"{workers} tokenizer processes: before sglang#24462 (May 2026) a pause reached one of them"
        return Survey(found.kind, found.version, found.lacks, (*found.notes, note))
    return found


def _launch_fastdeploy(first: str = "") -> str:
    line = (
        "FD_ENABLE_V1_UPDATE_WEIGHTS=1 python -m fastdeploy.entrypoints.openai.api_server --model MODEL ... "
        "--dynamic-load-weight --load-strategy ipc_snapshot --routing-replay-config "
        "'{\"enable_routing_replay\": true, ...}'"
    )
    return f"{first}: {line}" if first else line


def _fastdeploy(config: Mapping[str, Any]) -> Survey:
    if not config:
        note = "/config-info is not served here, so its flags are unknown; look at its --metrics-port"
        return Survey("fastdeploy", None, (), (note, f"all that moebus uses: {_launch_fastdeploy()}"))
    checks: tuple[tuple[str, Callable[[], Any], str, bool], ...] = (
        (
            "--dynamic-load-weight", lambda: _at(config, "load_config", "dynamic_load_weight"),
            "dynamic weights: sleep, wakeup and updates fail", True,
        ),
        (
            "FD_ENABLE_V1_UPDATE_WEIGHTS", lambda: _at(config, "env_config", "FD_ENABLE_V1_UPDATE_WEIGHTS"),
            "the v1 control path in its workers: with expert parallelism an update never ends", True,
        ),
        (
            "routing replay", lambda: _at(config, "routing_replay_config", "enable_routing_replay"),
            "routing replay: there are no routes to publish", False,
        ),
    )  # fmt: skip
    lacks, notes = [], []
    for name, read, lack, serious in checks:
        value = read()
        if value is None:
            notes.append(f"whether {name} is on it does not tell")
        elif value in (False, 0, "0"):
            lacks.append(Lack(lack, _launch_fastdeploy(), serious))
        else:
            notes.append(f"{name} is on")
    if str(_at(config, "load_config", "load_strategy")).lower() == "rsync":
        notes.append("load strategy rsync: weights are updated by version, and cannot sleep")
    return Survey("fastdeploy", None, tuple(lacks), tuple(notes))


def _at(config: Mapping[str, Any], section: str, name: str) -> Any:
    found = config.get(section)
    return found.get(name) if isinstance(found, dict) else None
