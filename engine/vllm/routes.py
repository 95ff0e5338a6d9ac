"""Routes out of vLLM's answers: `/v1/completions`, `/v1/chat/completions`, `/inference/v1/generate`, and those that
pass through Dynamo's frontend (`nvext`). Docs: `docs/answers.md`.

`choices[i].routed_experts`: base64 of a `.npy` array [rows, num_hidden_layers, top_k], all tokens but the last, from
`routed_experts_prompt_start` on. vLLM 0.21 and before have the prompt's rows apart, in `prompt_routed_experts`.
"""

from __future__ import annotations

import numpy.typing as npt

from moebus.engine.answers import fields, openai
from moebus.engine.answers.decoded import Choice, DecodedRoutes, decode_choice
from moebus.engine.answers.payload import Layers
from moebus.engine.answers.stream import AnswerStream, merge_object
from moebus.schemas.model_card import ModelCard


def decode_routes(
    response: object,
    card: ModelCard,
    start: int = 0,
    *,
    prompt_token_ids: npt.ArrayLike | None = None,
    layers: Layers | None = None,
) -> list[DecodedRoutes]:
    """The routes of every choice, by their order in the answer.

    Args:
        response: the answer: an object, or its JSON text.
        start: what the request named as `routed_experts_prompt_start`.
        prompt_token_ids: [n] what was sent; needed where the answer does not repeat it (`return_token_ids`).
        layers: which layers the server counts, where the size alone cannot tell.

    Raises:
        InvalidInput: naming the field, `choices[1].routed_experts`.
    """
    answer = fields.mapping(fields.parsed(response), "response")
    given = None if prompt_token_ids is None else fields.token_array(prompt_token_ids, "prompt_token_ids")
    listed = openai.choices_of(answer)
    found = [_choice(answer, one, path, place, len(listed), given) for place, (one, path) in enumerate(listed)]
    return [decode_choice(choice, card, start, layers) for choice in openai.check_choices(found, "choices")]


def _choice(
    answer: openai.Json, one: openai.Json, path: str, place: int, number: int, given: fields.Tokens | None
) -> Choice:
    nvext, usage = fields.member(answer, "nvext", ""), fields.member(answer, "usage", "")
    choice = Choice(openai.index_of(one, path, place), fields.join(path, "routed_experts"))
    said = openai.first_tokens((one, path, "prompt_token_ids"), (answer, "", "prompt_token_ids"))
    choice.prompt_ids = openai.same_prompt(given, said, "prompt_token_ids")
    choice.output_ids = openai.first_tokens((one, path, "token_ids"))
    if number == 1:
        if choice.output_ids is None:
            choice.output_ids = openai.first_tokens((nvext, "nvext", "completion_token_ids"))
        choice.output = fields.count(usage, "completion_tokens", "usage")
    if choice.prompt_ids is None or number == 1:
        choice.prompt = fields.count(usage, "prompt_tokens", "usage")
    choice.value = one.get("routed_experts")
    for holder, where in ((one, path), (answer, "")):
        if choice.prompt_value is None:
            choice.prompt_path = fields.join(where, "prompt_routed_experts")
            choice.prompt_value = holder.get("prompt_routed_experts")
    if choice.value is None and nvext.get("routed_experts") is not None:
        choice.path = "nvext.routed_experts"
        choice.value = openai.alone(number, nvext["routed_experts"], choice.path)
    choice.finish_reason = openai.word(one, "finish_reason", path)
    choice.request_id = fields.text(answer, "id", "") or fields.text(answer, "request_id", "")
    openai.read_versions(choice, (one, path), (answer, ""), (fields.member(answer, "metadata", ""), "metadata"))
    return choice


class RouteStream(AnswerStream):
    """The chunks of one streamed answer, put together; see `AnswerStream`. vLLM streams routes on
    `/inference/v1/generate` alone, once, on the chunk that ends a choice; token ids come a few a chunk."""

    def _decode(self, answer: object) -> list[DecodedRoutes]:
        return decode_routes(answer, self.card, self.start, prompt_token_ids=self.prompt_token_ids, layers=self.layers)

    def _merge(self, chunk: openai.Json) -> None:
        self.merge_top(chunk)
        for kept, one, path in self.each_choice(chunk):
            merge_object(kept, one, path, ("token_ids",))
