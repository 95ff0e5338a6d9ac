"""Routes out of FastDeploy's answers in `response` mode (`routing_replay_config`): `/v1/chat/completions` and
`/v1/completions`. Docs: `docs/answers.md`.

`routed_experts`: base64 of bare integers [rows, moe_layers, top_k] without shape or type: int64 where the answer went
through msgpack, else the smallest unsigned type that leaves all ones free. One value for the whole answer, so n = 1.
Request ids are read here, and nowhere else: `rollout_id_of`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moebus.engine.answers import fields, openai
from moebus.engine.answers.decoded import Choice, DecodedRoutes, decode_choice
from moebus.engine.answers.payload import Layers
from moebus.engine.answers.stream import AnswerStream, merge_object
from moebus.schemas.dtypes import fastdeploy_dtype
from moebus.schemas.fastdeploy_ids import parse_request_id
from moebus.schemas.model_card import ModelCard

_FIELD = "routed_experts"
_DELTAS = ("completion_token_ids",)
_DELTA = (*_DELTAS, "prompt_token_ids")


def decode_routes(
    response: object,
    card: ModelCard,
    start: int = 0,
    *,
    prompt_token_ids: npt.ArrayLike | None = None,
    layers: Layers | None = "moe",
) -> list[DecodedRoutes]:
    """The routes of every choice, by their order in the answer.

    Args:
        response: the answer: an object, or its JSON text.
        start: the first row that the answer holds; FastDeploy always sends them from 0.
        prompt_token_ids: [n] what was sent; needed where the answer does not repeat it (`return_token_ids`).
        layers: which layers the server counts; FastDeploy those that route.

    Raises:
        InvalidInput: naming the field, `routed_experts`.
    """
    answer = fields.mapping(fields.parsed(response), "response")
    given = None if prompt_token_ids is None else fields.token_array(prompt_token_ids, "prompt_token_ids")
    listed = openai.choices_of(answer)
    found = [_choice(answer, one, path, place, len(listed), given) for place, (one, path) in enumerate(listed)]
    for choice in found:
        choice.bare = _types(card)
    return [decode_choice(choice, card, start, layers) for choice in openai.check_choices(found, "choices")]


def rollout_id_of(response: object) -> str:
    """The rollout id in the request id of an answer, `chatcmpl-{user}-{uuid4}`: it was sent as `user`.

    Raises:
        InvalidInput: field `request_id`: no such id, or no user part.
    """
    answer = fields.mapping(fields.parsed(response), "response")
    text = fields.text(answer, "id", "") or ""
    head, mark, tail = text.rpartition("_")  # of the whole answer, so without the `_{choice}` that a request has
    return parse_request_id(text if mark and head and tail.isdecimal() else f"{text}_0").rollout_id


def _choice(
    answer: openai.Json, one: openai.Json, path: str, place: int, number: int, given: fields.Tokens | None
) -> Choice:
    usage = fields.member(answer, "usage", "")
    message, where = fields.member(one, "message", path), fields.join(path, "message")
    choice = Choice(openai.index_of(one, path, place), fields.join(path, _FIELD))
    said = openai.first_tokens((message, where, "prompt_token_ids"), (one, path, "prompt_token_ids"))
    choice.prompt_ids = openai.same_prompt(given, said, "prompt_token_ids")
    choice.output_ids = openai.first_tokens(
        (message, where, "completion_token_ids"), (one, path, "completion_token_ids")
    )
    if number == 1:
        choice.output = fields.count(usage, "completion_tokens", "usage")
    if choice.prompt_ids is None or number == 1:
        choice.prompt = fields.count(usage, "prompt_tokens", "usage")
    choice.value = one.get(_FIELD)
    for holder, at in ((message, where), (answer, "")):
        if choice.value is None and holder.get(_FIELD) is not None:
            choice.path = fields.join(at, _FIELD)
            choice.value = holder[_FIELD] if at else openai.alone(number, holder[_FIELD], choice.path)
    choice.finish_reason = openai.word(one, "finish_reason", path)
    choice.request_id = fields.text(answer, "id", "")
    openai.read_versions(choice, (one, path), (answer, ""))
    return choice


def _types(card: ModelCard) -> tuple[np.dtype[np.integer], ...]:
    """The types a bare text may have: shared experts, which the card does not count, may widen the smallest one."""
    smallest = fastdeploy_dtype(card.num_experts).itemsize
    unsigned = [np.dtype(f"<u{size}") for size in (1, 2, 4) if size in (smallest, 2 * smallest)]
    return (*unsigned, np.dtype("<i8"))


class RouteStream(AnswerStream):
    """The chunks of one streamed answer, put together; see `AnswerStream`. FastDeploy sends routes only with answers
    that are not streamed: without them the result is `missing`."""

    def _decode(self, answer: object) -> list[DecodedRoutes]:
        layers: Layers | None = self.layers or "moe"
        return decode_routes(answer, self.card, self.start, prompt_token_ids=self.prompt_token_ids, layers=layers)

    def _merge(self, chunk: openai.Json) -> None:
        self.merge_top(chunk)
        for kept, one, path in self.each_choice(chunk):
            merge_object(kept, one, path, _DELTAS)
            delta = fields.member(one, "delta", path)
            merge_object(kept, {name: delta.get(name) for name in _DELTA}, fields.join(path, "delta"), _DELTAS)
