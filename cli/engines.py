"""Builds the engine that `moebus worker --engine KIND` drives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TypeVar

from moebus.engine.port import GeneratingEngine
from moebus.schemas.errors import InvalidInput, SettingsError
from moebus.schemas.model_card import ModelCard

T = TypeVar("T")


class EngineKind(str, Enum):
    """Engines that a worker can drive."""

    SIMULATED = "simulated"
    PADDLE = "paddle"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the command line says of an engine. `config`: JSON file with fields of the engine's config, for Paddle also
    a Hugging Face `config.json`."""

    kind: EngineKind
    seed: int
    version: str
    weights: str | None
    config: Path | None
    roots: tuple[str, ...]


def make_engine(options: EngineOptions) -> tuple[GeneratingEngine, ModelCard]:
    """The engine and the card of its routes.

    Raises:
        SettingsError: a bad config file.  PaddleUnavailable: Paddle is not installed or too old.
        EngineRefused: the weights are not usable.
    """
    roots = options.roots
    if options.kind is EngineKind.PADDLE:
        from moebus.engine.paddle import ModelConfig, PaddleEngine, model_config

        described = _read(options.config) if options.config else {}
        hugging_face = "model_type" in described
        model = model_config(described) if hugging_face else _config(ModelConfig, options.config)
        engine = PaddleEngine.create(
            model, seed=options.seed, version=options.version, source=options.weights, allowed_roots=roots
        )
        return engine, model.card()
    from moebus.engine.simulated import SimulatedConfig, SimulatedEngine

    if options.weights is not None:
        raise SettingsError("--weights: a simulated engine starts without weights; leave it out")
    simulated = _config(SimulatedConfig, options.config, seed=options.seed)
    return SimulatedEngine(simulated, version=options.version, allowed_roots=roots), simulated.card()


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
