"""Routes out of SGLang's answers: `/generate` (one object, or a list of them for n > 1), `/v1/chat/completions` and
`/v1/completions`. Docs: `docs/answers.md`.

`meta_info.routed_experts`: base64 of int32 [rows, num_hidden_layers, top_k] without a shape, all tokens but the last,
from `routed_experts_start_len` on; uint16 or uint8 where `routed_experts_dtype` says so. The OpenAI paths have it in
`choices[i].meta_info` (`return_meta_info`), or once for the whole answer in `sglext` (behind Dynamo: `nvext`).
"""

from __future__ import annotations

import numpy.typing as npt

from moebus.engine.answers import fields, openai
from moebus.engine.answers.decoded import Choice, DecodedRoutes, decode_choice
from moebus.engine.answers.payload import Layers, dtype_of
from moebus.engine.answers.stream import AnswerStream, merge_object
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.rollout import MAX_CHOICE


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
        response: the answer: an object, a list of them (`/generate` with n > 1), or their JSON text.
        start: what the request named as `routed_experts_start_len`.
        prompt_token_ids: [n] what was sent; SGLang does not repeat it unless `return_prompt_token_ids` is on.
        layers: which layers the server counts, where the size alone cannot tell.

    Raises:
        InvalidInput: naming the field, `[1].meta_info.routed_experts`.
    """
    answer = fields.parsed(response)
    given = None if prompt_token_ids is None else fields.token_array(prompt_token_ids, "prompt_token_ids")
    if isinstance(answer, (list, tuple)):
        if not 1 <= len(answer) <= openai.MAX_CHOICES:
            raise InvalidInput("response", f"{len(answer)} choices; 1 to {openai.MAX_CHOICES} are allowed")
        found = [_native(one, fields.at("", place), place, given) for place, one in enumerate(answer)]
    elif "meta_info" in fields.mapping(answer, "response"):
        found = [_native(answer, "", 0, given)]
    else:
        whole = fields.mapping(answer, "response")
        listed = openai.choices_of(whole)
        found = [_openai(whole, one, path, place, len(listed), given) for place, (one, path) in enumerate(listed)]
    return [decode_choice(choice, card, start, layers) for choice in openai.check_choices(found, "response")]


def _native(value: object, path: str, place: int, given: fields.Tokens | None) -> Choice:
    one = fields.mapping(value, path or "response")
    meta, where = fields.member(one, "meta_info", path), fields.join(path, "meta_info")
    index = fields.count(one, "index", path)
    choice = Choice(place if index is None else min(index, MAX_CHOICE), fields.join(where, "routed_experts"))
    said = openai.first_tokens((one, path, "prompt_token_ids"), (meta, where, "prompt_token_ids"))
    choice.prompt_ids = openai.same_prompt(given, said, "prompt_token_ids")
    choice.output_ids = openai.first_tokens((one, path, "output_ids"))
    _meta(choice, meta, where)
    openai.read_versions(choice, (meta, where))
    return choice


def _openai(
    answer: openai.Json, one: openai.Json, path: str, place: int, number: int, given: fields.Tokens | None
) -> Choice:
    usage = fields.member(answer, "usage", "")
    meta, where = fields.member(one, "meta_info", path), fields.join(path, "meta_info")
    choice = Choice(openai.index_of(one, path, place), fields.join(where, "routed_experts"))
    places = ((one, path), (meta, where), (answer, ""))
    said = openai.first_tokens(*((holder, at, "prompt_token_ids") for holder, at in places))
    choice.prompt_ids = openai.same_prompt(given, said, "prompt_token_ids")
    choice.output_ids = openai.first_tokens((one, path, "token_ids"), (one, path, "output_ids"))
    _meta(choice, meta, where)
    choice.finish_reason = openai.word(one, "finish_reason", path) or choice.finish_reason
    if number == 1 and choice.output is None:
        choice.output = fields.count(usage, "completion_tokens", "usage")
    if choice.prompt is None:
        choice.prompt = fields.count(usage, "prompt_tokens", "usage")
    for name in ("sglext", "nvext"):  # its own, and Dynamo's
        ext = fields.member(answer, name, "")
        if choice.output_ids is None and number == 1:
            choice.output_ids = openai.first_tokens((ext, name, "completion_token_ids"))
        if choice.value is None and ext.get("routed_experts") is not None:
            choice.path = fields.join(name, "routed_experts")
            choice.value = openai.alone(number, _value(ext, name), choice.path)
            _dtype(choice, ext, name)
    openai.read_versions(choice, (meta, where), (one, path), (fields.member(answer, "metadata", ""), "metadata"))
    choice.request_id = fields.text(answer, "id", "") or choice.request_id
    return choice


def _meta(choice: Choice, meta: openai.Json, where: str) -> None:
    """What `meta_info` says of a choice."""
    if choice.output_ids is None and meta.get("output_token_logprobs") is not None:
        choice.output_ids = _logprob_ids(meta["output_token_logprobs"], fields.join(where, "output_token_logprobs"))
    choice.prompt = fields.count(meta, "prompt_tokens", where)
    choice.output = fields.count(meta, "completion_tokens", where)
    choice.start = fields.count(meta, "routed_experts_start_len", where)
    choice.value = _value(meta, where)
    choice.finish_reason = openai.word(meta, "finish_reason", where)
    choice.request_id = fields.text(meta, "id", where)
    _dtype(choice, meta, where)


def _value(holder: openai.Json, where: str) -> object:
    value = holder.get("routed_experts")
    if value == {}:  # what is left of a tensor that nobody encoded
        raise InvalidInput(
            fields.join(where, "routed_experts"), "an empty object: the server runs with --skip-tokenizer-init"
        )
    return value


def _dtype(choice: Choice, holder: openai.Json, where: str) -> None:
    name = holder.get("routed_experts_dtype")
    choice.bare = (dtype_of("int32" if name is None else name, fields.join(where, "routed_experts_dtype")),)


def _logprob_ids(value: object, path: str) -> fields.Tokens:
    """The ids of `[[log probability, token id, text], ...]`."""
    entries = [fields.items(entry, fields.at(path, place)) for place, entry in enumerate(fields.items(value, path))]
    if any(len(entry) < 2 for entry in entries):
        raise InvalidInput(path, "entries [log probability, token id] are needed")
    return fields.token_array([entry[1] for entry in entries], path)


class RouteStream(AnswerStream):
    """The events of one streamed answer, put together; see `AnswerStream`. `/generate` sends all tokens so far each
    time (only the new ones with `--incremental-streaming-output`): `completion_tokens` tells which."""

    def _decode(self, answer: object) -> list[DecodedRoutes]:
        return decode_routes(answer, self.card, self.start, prompt_token_ids=self.prompt_token_ids, layers=self.layers)

    def _merge(self, chunk: openai.Json) -> None:
        if "meta_info" in chunk:
            self._merge_native(chunk)
            return
        self.merge_top(chunk)
        for kept, one, path in self.each_choice(chunk):
            merge_object(kept, one, path)

    def _merge_native(self, chunk: openai.Json) -> None:
        meta = fields.member(chunk, "meta_info", "")
        index = fields.count(chunk, "index", "") or 0
        kept = self.objects.setdefault(index, {"index": index, "meta_info": {}})
        known = kept["meta_info"]
        assert isinstance(known, dict)
        total = fields.count(meta, "completion_tokens", "meta_info")
        for holder, new, name, path in (
            (kept, chunk, "output_ids", "output_ids"),
            (known, meta, "output_token_logprobs", "meta_info.output_token_logprobs"),
        ):
            if new.get(name) is not None:
                holder[name] = _joined(holder.get(name), fields.items(new[name], path), total, path)
        merge_object(known, {key: value for key, value in meta.items() if key != "output_token_logprobs"}, "meta_info")
        merge_object(kept, {"prompt_token_ids": chunk.get("prompt_token_ids")}, "")


def _joined(known: object, new: object, total: int | None, path: str) -> list[object]:
    """All tokens so far: what the event repeats, or what it adds."""
    before = list(known) if isinstance(known, list) else []
    fresh = list(new) if isinstance(new, (list, tuple)) else []
    if total is None or len(fresh) == total:
        return fresh
    if len(before) + len(fresh) != total:
        raise InvalidInput(path, f"{len(fresh)} tokens after {len(before)}, but the event counts {total}")
    return before + fresh
