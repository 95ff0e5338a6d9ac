"""What a handover says about itself: model, weights, prompt, sampling; strictly checked, as it comes from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from moebus.engine.paddle.config import ModelConfig
from moebus.engine.port import EngineRefused, Prompt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import MAX_LAYERS

Spans = tuple[tuple[int, str], ...]
Layout = list[tuple[tuple[int, ...], np.dtype[Any]]]

_OF_AN_ENGINE = frozenset(("block_size", "num_blocks", "max_batch", "max_position", "cpu_blocks", "prefill_chunk"))
_MAX_NAME = 4096


class HandoverRefused(EngineRefused):
    """A handover is cut, damaged, or of another model, weight version or prompt; the text says which."""


def model_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields that say what is computed; those of an engine's memory and schedule may differ."""
    return {name: value for name, value in asdict(config).items() if name not in _OF_AN_ENGINE}


@dataclass(frozen=True, slots=True)
class Head:
    """`config`: the model; its engine fields are the defaults. `weights_version`, `weights_digest`: the weights that
    computed the last row. `first`: the first sampled token and its natural log probability, None where none was asked
    for. `routes`: whether the rows' routes are there. `versions`: ((start_row, version), ...) of the prompt's rows.
    `cached_tokens`: prompt tokens that the prefill engine's prefix cache served."""

    request_id: str
    config: ModelConfig
    weights_version: str
    weights_digest: str
    prompt_tokens: int
    temperature: float
    top_p: float
    seed: int
    first: tuple[int, float] | None
    routes: bool
    versions: Spans
    cached_tokens: int

    def layout(self) -> Layout:
        """Shape and type of each array, in their order."""
        config, rows = self.config, self.prompt_tokens
        cached = (config.num_layers + config.draft_layers, rows, config.num_kv_heads, config.head_dim)
        both: Layout = [(cached, np.dtype("<f4"))] * 2
        card = config.card()
        routes: Layout = [(card.shape(rows), card.dtype.newbyteorder("<"))] if self.routes else []
        return [((rows,), np.dtype("<i8")), *both, *routes]

    def of_one_version(self) -> bool:
        """All rows were computed by the weights that computed the last one."""
        return self.versions == ((0, self.weights_version),)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises HandoverRefused unless this is of `prompt`, sampled in its way."""
        for name in ("request_id", "temperature", "top_p", "seed"):
            theirs, ours = getattr(self, name), getattr(prompt, name)
            if theirs != ours:
                raise HandoverRefused(f"handover: it was prefilled with {name} {theirs!r}, not {ours!r}")
        if (self.first is None) != (prompt.max_tokens == 0):
            raise HandoverRefused(
                f"handover: {prompt.max_tokens} tokens are asked for, it was prefilled for {self._sampled()}"
            )

    def _sampled(self) -> str:
        return "none" if self.first is None else "some"

    def check_engine(self, config: ModelConfig, version: str | None, digest: str | None) -> None:
        """Raises HandoverRefused unless an engine of `config` that serves `version` would have computed the same."""
        ours = model_fields(config)
        for name, theirs in model_fields(self.config).items():
            if theirs != ours[name]:
                raise HandoverRefused(
                    f"handover: the model of {self.request_id!r} has {name} {theirs}, not {ours[name]}"
                )
        if self.weights_version != version:
            raise HandoverRefused(
                f"handover: {self.request_id!r} was prefilled by version {self.weights_version!r}, this engine serves"
                f" {version!r}; prefill it again"
            )
        if self.weights_digest != digest:
            raise HandoverRefused(
                f"handover: version {version!r} is not the same there and here (weights digest {self.weights_digest},"
                f" not {digest})"
            )

    def to_json(self) -> bytes:
        whole = {field.name: getattr(self, field.name) for field in fields(self)} | {
            "config": model_fields(self.config)
        }
        return json.dumps(whole, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Head:
        """The inverse. Raises HandoverRefused, naming the field."""
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            raise HandoverRefused("handover: its head is not JSON") from None
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or found.keys() != names:
            raise HandoverRefused("handover: its head does not have the fields it should")
        return cls(**{name: _READERS.get(name, _text)(found[name], name) for name in names})


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value or len(value) > _MAX_NAME:
        raise HandoverRefused(f"handover: {name} is not a string of 1 to {_MAX_NAME} characters")
    return value


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise HandoverRefused(f"handover: {name} is not an integer of at least {least}")
    return value


def _real(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise HandoverRefused(f"handover: {name} is not a finite number")
    return float(value)


def _flag(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise HandoverRefused(f"handover: {name} is not true or false")
    return value


def _first(value: Any, name: str) -> tuple[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise HandoverRefused(f"handover: {name} is not a token and its log probability")
    return _count(value[0], name), _real(value[1], name)


def _spans(value: Any, name: str) -> Spans:
    pairs = value if isinstance(value, list) else []
    if not pairs or not all(isinstance(one, list) and len(one) == 2 for one in pairs):
        raise HandoverRefused(f"handover: {name} is not a list of rows and versions")
    spans = tuple((_count(start, name), _text(version, name)) for start, version in pairs)
    starts = [start for start, _ in spans]
    if starts[0] != 0 or sorted(set(starts)) != starts:
        raise HandoverRefused(f"handover: {name} does not begin at row 0 and ascend")
    return spans


def _config(value: Any, name: str) -> ModelConfig:
    known = model_fields(ModelConfig())
    if not isinstance(value, dict) or value.keys() != known.keys():
        raise HandoverRefused("handover: its model does not have the fields that this release knows")
    made: dict[str, Any] = {}
    for field, like in known.items():
        one = value[field]
        if isinstance(like, tuple):
            one = tuple(one) if isinstance(one, list) else one
        if type(one) is not type(like) or (isinstance(one, tuple) and not all(type(part) is int for part in one)):
            raise HandoverRefused(f"handover: {field} of its model is {one!r}, which is no {type(like).__name__}")
        made[field] = one
    if made["num_layers"] > MAX_LAYERS or made["draft_layers"] > MAX_LAYERS:
        raise HandoverRefused(f"handover: its model has more than {MAX_LAYERS} layers")
    try:
        return ModelConfig(**made)
    except InvalidInput as error:
        raise HandoverRefused(f"handover: its model cannot be ({error})") from None


_READERS: Mapping[str, Any] = {
    "config": _config,
    "prompt_tokens": lambda value, name: _count(value, name, 1),
    "temperature": _real,
    "top_p": _real,
    "seed": _count,
    "first": _first,
    "routes": _flag,
    "versions": _spans,
    "cached_tokens": _count,
}
