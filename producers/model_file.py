"""The ModelCard of a model on disk."""

from __future__ import annotations

import json
from pathlib import Path

from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard


def read_card(model: Path, field: str = "model") -> ModelCard:
    """The card of a model's `config.json` (a file, or the folder that has it), or of a file with a ModelCard.

    Raises:
        InvalidInput: `field`, where the file cannot be read; else naming what it does not say.
    """
    path = model / "config.json" if model.is_dir() else model
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput(field, f"{path} cannot be read: {error.strerror}") from None
    try:
        config = json.loads(text)
    except ValueError:
        raise InvalidInput(field, f"{path} is not JSON") from None
    if not isinstance(config, dict):
        raise InvalidInput(field, f"{path} is not a JSON object")
    if "moe_layers" in config:
        return ModelCard.from_dict(config)
    return ModelCard.from_hf_config(config, name=path.parent.name or None)
