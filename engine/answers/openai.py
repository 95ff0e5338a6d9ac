"""What answers in OpenAI's form have in common: choices, usage, token ids, weight versions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moebus.engine.answers import fields
from moebus.engine.answers.decoded import Choice
from moebus.engine.answers.versions import read_spans, read_version
from moebus.schemas.base import echo
from moebus.schemas.errors import InvalidInput
from moebus.schemas.rollout import MAX_CHOICE

Json = Mapping[str, object]
MAX_CHOICES = 4096


def choices_of(answer: Json) -> list[tuple[Json, str]]:
    """The choices and their paths, by index.

    Raises:
        InvalidInput: field `choices`; with the server's own words where it answered an error.
    """
    if answer.get("choices") is None:
        error = answer.get("error") or (answer.get("message") if answer.get("object") == "error" else None)
        words = error.get("message") if isinstance(error, Mapping) else error
        raise InvalidInput("choices", f"missing; the answer is an error: {echo(words)}" if error else "missing")
    listed = fields.items(answer["choices"], "choices")
    if not 1 <= len(listed) <= MAX_CHOICES:
        raise InvalidInput("choices", f"{len(listed)} choices; 1 to {MAX_CHOICES} are allowed")
    return [
        (fields.mapping(one, path), path) for one, path in ((c, fields.at("choices", i)) for i, c in enumerate(listed))
    ]


def index_of(choice: Json, path: str, place: int) -> int:
    """The index a choice says it has; its place where it says none."""
    found = fields.count(choice, "index", path)
    if found is not None and found > MAX_CHOICE:
        raise InvalidInput(fields.join(path, "index"), f"{found} is above {MAX_CHOICE}")
    return place if found is None else found


def first_tokens(*places: tuple[Json, str, str]) -> fields.Tokens | None:
    """Token ids out of the first (object, path, name) that has them."""
    for holder, path, name in places:
        found = fields.tokens(holder, name, path)
        if found is not None:
            return found
    return None


def word(holder: Json, name: str, path: str) -> str:
    """A finish reason: text, or SGLang's object with `type`."""
    value = holder.get(name)
    if isinstance(value, Mapping):
        return fields.text(value, "type", fields.join(path, name)) or ""
    return fields.text(holder, name, path) or ""


def read_versions(choice: Choice, *places: tuple[Json, str]) -> None:
    """Fills in `weight_versions` (of tokens) and `weight_version` (of the whole), each from the first that has it."""
    for holder, path in places:
        if not choice.spans and holder.get("weight_versions") is not None:
            choice.spans_path = fields.join(path, "weight_versions")
            choice.spans = read_spans(holder["weight_versions"], choice.spans_path)
        if choice.version is None and holder.get("weight_version") is not None:
            choice.version = read_version(holder["weight_version"], fields.join(path, "weight_version"))


def check_choices(found: list[Choice], path: str) -> list[Choice]:
    """The choices of one prompt, each index once; a batch of prompts has several rollout ids and is not one answer.

    Raises:
        InvalidInput: field `path`.
    """
    if len({choice.index for choice in found}) != len(found):
        raise InvalidInput(path, "two choices with one index")
    prompts = [choice.prompt_ids for choice in found if choice.prompt_ids is not None]
    lengths = {choice.prompt for choice in found if choice.prompt is not None}
    if len(lengths) > 1 or any(not np.array_equal(prompts[0], other) for other in prompts[1:]):
        raise InvalidInput(path, "choices of different prompts; publish the answer of each prompt by itself")
    return found


def same_prompt(given: fields.Tokens | None, said: fields.Tokens | None, path: str) -> fields.Tokens | None:
    """The prompt's token ids: the caller's, which must be the answer's where both are known."""
    if given is not None and said is not None and not np.array_equal(given, said):
        raise InvalidInput("prompt_token_ids", f"not those that the answer has in {path}")
    return said if given is None else given


def alone(choice_count: int, value: object, path: str) -> object:
    """`value` of the whole answer as that of its only choice.

    Raises:
        InvalidInput: field `path`, where there are several choices: nobody can tell whose it is.
    """
    if value is not None and choice_count > 1:
        raise InvalidInput(path, f"one value for {choice_count} choices, so nobody knows whose; ask for n=1")
    return value
