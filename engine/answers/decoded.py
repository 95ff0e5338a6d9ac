"""One choice of an answer, decoded: what all servers' decoders hand over, and what they make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from moebus.engine.answers import fields
from moebus.engine.answers.payload import Allowed, Integers, Layers, read_array, start_of
from moebus.engine.answers.select import Mask, select
from moebus.engine.answers.versions import Span, row_spans
from moebus.engine.prompts import route_rows
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record.types import Status

Ending = Literal["done", "cut", "open"]
_DONE = frozenset(["stop", "length", "tool_calls", "function_call", "content_filter", "repetition"])
_CUT = frozenset(["abort", "aborted", "error", "cancelled", "recover_stop"])
"""vLLM, SGLang and FastDeploy; any other word, and none, is a rollout that did not come to its end: `partial`."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRoutes:
    """The routes of one choice.

    `routes` [rows, moe_layers, top_k] uint8, uint16 or uint32, it may be read-only: row i is token `start + i`.
    `valid` [rows] bool: False where the server recorded nothing (its ids are 0); a prompt that came out of a cache of
    another process has such rows at the front. `status`: as of an END; `missing` = the answer has no routes.
    `prompt_rows`: tokens of the prompt, None where the answer does not say. `token_ids` int64 [prompt + output], where
    known. `versions`: ((first row, weight version), ...), absolute. `path`: the field the routes came from.
    """

    choice: int
    routes: RouteArray
    start: int
    valid: Mask
    status: Status
    finish_reason: str
    prompt_rows: int | None
    token_ids: fields.Tokens | None
    versions: tuple[tuple[int, str], ...]
    path: str
    request_id: str | None = None

    @property
    def rows(self) -> int:
        """Rows of the rollout, those before `start` included."""
        return self.start + len(self.routes)

    @property
    def first_recorded(self) -> int:
        """The first row from which on everything was recorded; `rows` where nothing was.

        Raises:
            InvalidInput: field `path`: rows between recorded ones were not.
        """
        first = int(np.argmax(self.valid)) if self.valid.any() else len(self.valid)
        if not self.valid[first:].all():
            row = self.start + first + int(np.argmin(self.valid[first:]))
            raise InvalidInput(self.path, f"row {row} was not recorded, though earlier ones were")
        return self.start + first


@dataclass(slots=True)
class Choice:
    """What a server's answer says of one choice, before anything is decoded. `path`: of the field with the routes.

    `prompt_value`: routes of the prompt where they come apart from those of the output. `prompt`, `output`: numbers of
    tokens. `start`: the first row, where the answer names it. `bare`: types of a text without a header.
    """

    index: int
    path: str
    value: object = None
    prompt_value: object = None
    prompt_path: str = ""
    prompt_ids: fields.Tokens | None = None
    output_ids: fields.Tokens | None = None
    prompt: int | None = None
    output: int | None = None
    start: int | None = None
    finish_reason: str = ""
    spans: Sequence[Span] = ()
    spans_path: str = "weight_versions"
    version: str | None = None
    bare: Sequence[np.dtype[np.integer]] = field(default=())
    request_id: str | None = None


def status_of(finish_reason: str) -> Status:
    """`complete`, `aborted` or `partial` (not ended, or ended by a word nobody knows)."""
    if finish_reason in _DONE:
        return "complete"
    return "aborted" if finish_reason in _CUT else "partial"


def decode_choice(choice: Choice, card: ModelCard, start: int, layers: Layers | None) -> DecodedRoutes:
    """Raises InvalidInput, naming the field of the answer."""
    prompt = _agreed(choice.prompt_ids, choice.prompt, "prompt", choice.path)
    output = _agreed(choice.output_ids, choice.output, "output", choice.path)
    if choice.value is None and choice.prompt_value is None:
        return _without_routes(choice, card, start, prompt, output)
    if prompt is None or output is None:
        which = "prompt" if prompt is None else "output"
        raise InvalidInput(choice.path, f"the answer does not say how many {which} tokens there are, so not which rows")
    first = _start(choice, start)
    wanted = route_rows(prompt, output) - first
    if wanted < 0:
        raise InvalidInput(
            "start", f"{first}, but {prompt} prompt and {output} output tokens have {wanted + first} rows"
        )
    if wanted and choice.prompt_value is None and choice.bare and choice.value in ("", []):
        return _without_routes(choice, card, start, prompt, output)  # how such servers say "none"
    found = _array(choice, card, prompt, output, first, layers)
    routes, valid = select(found[:wanted], card, choice.path, first)
    if not output:  # cut off in the middle of its prompt
        computed = int(np.flatnonzero(valid)[-1]) + 1 if valid.any() else 0
        routes, valid = routes[:computed], valid[:computed]
    elif len(valid) and not valid.any():
        raise InvalidInput(choice.path, f"none of the {len(valid)} rows was recorded")
    return _decoded(choice, routes, valid, first, prompt, output, status_of(choice.finish_reason))


def _agreed(ids: fields.Tokens | None, number: int | None, what: str, path: str) -> int | None:
    if ids is None or number is None:
        return number if ids is None else len(ids)
    if len(ids) != number:
        raise InvalidInput(path, f"{len(ids)} {what} token ids where the answer counts {number} {what} tokens")
    return number


def _start(choice: Choice, start: int) -> int:
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise InvalidInput("start", f"{start!r} is not an integer of at least 0")
    said = choice.start
    if choice.prompt_value is None and (named := start_of(choice.value, choice.path)) is not None:
        if said is not None and said != named:
            raise InvalidInput(fields.join(choice.path, "start"), f"{named}, but elsewhere the answer says {said}")
        said = named
    if said is not None and start not in (0, said):
        raise InvalidInput("start", f"{start}, but the rows of the answer begin at {said}")
    return start if said is None else said


def _array(choice: Choice, card: ModelCard, prompt: int, output: int, first: int, layers: Layers | None) -> Integers:
    if choice.prompt_value is None:
        rows = route_rows(prompt, output) - first
        # One row more: of the last token, at a stop (FastDeploy, miles). One less without output: "all but the last".
        other = rows + 1 if output else max(rows - 1, 0)
        return read_array(choice.value, choice.path, Allowed(card, _distinct(rows, other), layers), choice.bare)
    if first > prompt:
        raise InvalidInput("start", f"{first} is behind the {prompt} tokens of the prompt, whose routes come apart")
    before = read_array(choice.prompt_value, choice.prompt_path, Allowed(card, (prompt - first,), layers), choice.bare)
    if choice.value is None:
        if output > 1:
            raise InvalidInput(choice.path, f"missing, but {output} tokens were sampled")
        return before
    allowed = Allowed(card, _distinct(max(output - 1, 0), output), layers)
    after = read_array(choice.value, choice.path, allowed, choice.bare)
    if len(before) and len(after) and before.shape[1] != after.shape[1]:
        raise InvalidInput(choice.path, f"{after.shape[1]} layers, but {before.shape[1]} in {choice.prompt_path}")
    return before if not len(after) else after if not len(before) else np.concatenate([before, after])


def _distinct(*rows: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(rows))


def _without_routes(
    choice: Choice, card: ModelCard, start: int, prompt: int | None, output: int | None
) -> DecodedRoutes:
    """Aborted before anything was computed: no rows, and that is all of it. Else they are missing."""
    status = status_of(choice.finish_reason)
    if not (status == "aborted" and output == 0):
        status = "missing"
    none = np.zeros(card.shape(0), card.dtype)
    first = 0 if status == "missing" else _start(choice, start)
    return _decoded(choice, none, np.zeros(0, np.bool_), first, prompt, output, status)


def _decoded(
    choice: Choice, routes: RouteArray, valid: Mask, start: int, prompt: int | None, output: int | None, status: Status
) -> DecodedRoutes:
    versions: tuple[tuple[int, str], ...] = ()
    if choice.spans and prompt is not None and output is not None:
        versions = row_spans(choice.spans, prompt, output, start, choice.spans_path)
    elif choice.version is not None:
        versions = ((start, choice.version),)
    return DecodedRoutes(
        choice=choice.index, routes=routes, start=start, valid=valid, status=status,
        finish_reason=choice.finish_reason, prompt_rows=prompt, token_ids=_all_tokens(choice, output),
        versions=versions, path=choice.path, request_id=choice.request_id,
    )  # fmt: skip


def _all_tokens(choice: Choice, output: int | None) -> fields.Tokens | None:
    if choice.prompt_ids is None or (choice.output_ids is None and output != 0):
        return None
    after: npt.NDArray[np.int64] = np.empty(0, np.int64) if choice.output_ids is None else choice.output_ids
    return np.concatenate([choice.prompt_ids, after])
