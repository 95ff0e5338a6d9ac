"""Builds the engine that `moebus worker --engine KIND` drives."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from moebus.engine.port import GeneratingEngine
from moebus.schemas.errors import InvalidInput, SettingsError
from moebus.schemas.model_card import ModelCard

if TYPE_CHECKING:
    from moebus.engine.http import ServerEngine

T = TypeVar("T")


class EngineKind(str, Enum):
    """Engines that a worker can drive."""

    SIMULATED = "simulated"
    PADDLE = "paddle"
    FASTDEPLOY = "fastdeploy"
    VLLM = "vllm"
    SGLANG = "sglang"

    @property
    def is_server(self) -> bool:
        """Whether it is a server of its own, driven by its HTTP API."""
        return self in _SERVERS


_SERVERS: Mapping[EngineKind, tuple[str, str]] = {
    EngineKind.FASTDEPLOY: ("moebus.engine.fastdeploy", "FastDeployEngine"),
    EngineKind.VLLM: ("moebus.engine.vllm", "VllmEngine"),
    EngineKind.SGLANG: ("moebus.engine.sglang", "SGLangEngine"),
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the command line says of an engine. `config`: JSON file with fields of the engine's config, for Paddle also
    a Hugging Face `config.json`. None: not given. `url`, `token_file`: of a server."""

    kind: EngineKind
    seed: int | None
    version: str | None
    weights: str | None
    config: Path | None
    roots: tuple[str, ...]
    url: str | None = None
    token_file: Path | None = None


def check_options(options: EngineOptions) -> None:
    """Raises SettingsError, naming the option: missing for this kind, or of another kind."""
    kind = options.kind
    if kind.is_server:
        if options.url is None:
            raise SettingsError(f"--engine-url: needed with --engine {kind.value}, e.g. http://127.0.0.1:8000")
        given = {
            "--seed": options.seed,
            "--version": options.version,
            "--weights": options.weights,
            "--model-config": options.config,
        }
        for name, value in given.items():
            if value is not None:
                raise SettingsError(f"{name}: a {kind.value} server has its own; leave it out")
        return
    for name, value in (("--engine-url", options.url), ("--engine-token-file", options.token_file)):
        if value is not None:
            raise SettingsError(f"{name}: a {kind.value} engine runs in this process; leave it out")
    if kind is EngineKind.SIMULATED and options.weights is not None:
        raise SettingsError("--weights: a simulated engine starts without weights; leave it out")


def connect_engine(options: EngineOptions) -> ServerEngine:
    """The adapter of a server; connects to nothing yet.

    Raises:
        InvalidInput: the URL.  SettingsError: the token file.
    """
    from moebus.engine.http import read_token

    assert options.url is not None
    token = None if options.token_file is None else read_token(options.token_file)
    module, name = _SERVERS[options.kind]
    adapter = getattr(importlib.import_module(module), name)
    return cast("ServerEngine", adapter.connect(options.url, token=token, allowed_roots=options.roots))


def make_engine(options: EngineOptions) -> tuple[GeneratingEngine, ModelCard]:
    """An engine in this process and the card of its routes.

    Raises:
        SettingsError: a bad config file.  PaddleUnavailable: Paddle is not installed or too old.
        EngineRefused: the weights are not usable.
    """
    roots, seed, version = options.roots, options.seed or 0, options.version or "initial"
    if options.kind is EngineKind.PADDLE:
        from moebus.engine.paddle import ModelConfig, PaddleEngine, model_config

        described = _read(options.config) if options.config else {}
        hugging_face = "model_type" in described
        model = model_config(described) if hugging_face else _config(ModelConfig, options.config)
        engine = PaddleEngine.create(model, seed=seed, version=version, source=options.weights, allowed_roots=roots)
        return engine, model.card()
    from moebus.engine.simulated import SimulatedConfig, SimulatedEngine

    simulated = _config(SimulatedConfig, options.config, seed=seed)
    return SimulatedEngine(simulated, version=version, allowed_roots=roots), simulated.card()


def _config(kind: type[T], path: Path | None, **given: object) -> T:
    values = {**given, **(_read(path) if path else {})}
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise SettingsError(f"{path}: unknown field {name}; known are {', '.join(sorted(known))}")
    try:
        return kind(**values)
    except (InvalidInput, TypeError) as exc:
        raise SettingsError(f"{path}: {exc}") from exc


def _read(path: Path) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise SettingsError(f"engine config {path}: {exc}") from exc
    if not isinstance(found, dict):
        raise SettingsError(f"engine config {path}: a JSON object is needed")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
