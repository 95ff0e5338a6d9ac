"""Answers that come in pieces: chunks, or the text of server-sent events, put together into one answer."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping

import numpy.typing as npt

from moebus.engine.answers import fields
from moebus.engine.answers.decoded import DecodedRoutes
from moebus.engine.answers.payload import Layers, Pieces
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.rollout import MAX_CHOICE

Json = Mapping[str, object]
MAX_EVENT = 1 << 30
"""Characters of one event: routes of a million tokens fit, an endless line does not."""
_DONE = "[DONE]"
_FIELD = "data:"
_OBJECTS = ("nvext", "sglext", "metadata")


class AnswerStream:
    """Takes the chunks of one streamed answer in order. Token ids are added to those before; of routes the last ones
    count (servers send them once, or resend the whole), but pieces that say where they start and follow those before
    are joined. `decode` any time: a stream that broke off is `partial`.

    `objects`: answers by index, where a server streams several without `choices` (SGLang's `/generate`).
    """

    def __init__(
        self,
        card: ModelCard,
        start: int = 0,
        *,
        prompt_token_ids: npt.ArrayLike | None = None,
        layers: Layers | None = None,
        max_event: int = MAX_EVENT,
    ) -> None:
        """The arguments of `decode_routes`. `max_event`: characters of one event."""
        self.card = card
        self.start = start
        self.prompt_token_ids = prompt_token_ids
        self.layers: Layers | None = layers
        self.objects: dict[int, dict[str, object]] = {}
        self._top: dict[str, object] = {}
        self._choices: dict[int, dict[str, object]] = {}
        self._max_event = max_event
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line: list[str] = []
        self._data: list[str] = []
        self._size = 0
        self._after_cr = False
        self.done = False

    def feed(self, chunk: object) -> None:
        """One chunk: an object, or its JSON text.

        Raises:
            InvalidInput: naming the field.
        """
        one = fields.mapping(fields.parsed(chunk), "chunk")
        if one.get("error") is not None:
            raise InvalidInput(
                "error", f"the server broke the stream off: {json.dumps(one['error'], default=str)[:200]}"
            )
        self._merge(one)

    def feed_text(self, piece: bytes | str) -> None:
        """Text of server-sent events, cut anywhere. What follows `[DONE]` is ignored.

        Raises:
            InvalidInput: as `feed`; field `event`, where one is longer than `max_event`.
        """
        text = piece if isinstance(piece, str) else self._decoder.decode(piece)
        if self._after_cr and text.startswith("\n"):  # the other half of a line end
            text = text[1:]
        self._after_cr = text.endswith("\r") or (self._after_cr and not text)
        first, *rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._add(first)
        for line in rest:
            self._end_line()
            self._add(line)

    def response(self) -> object:
        """What has come so far as one answer, as `decode_routes` and `publish_response` take it.

        Raises:
            InvalidInput: field `response`, where nothing has come.
        """
        self._end_text()
        if self.objects:
            listed = [self.objects[index] for index in sorted(self.objects)]
            return listed if len(listed) > 1 else listed[0]
        if not self._choices:
            raise InvalidInput("response", "the stream had no choice")
        return {**self._top, "choices": [self._choices[index] for index in sorted(self._choices)]}

    def decode(self) -> list[DecodedRoutes]:
        """`decode_routes` of what has come so far."""
        return self._decode(self.response())

    def _decode(self, answer: object) -> list[DecodedRoutes]:
        raise NotImplementedError

    def _merge(self, chunk: Json) -> None:
        raise NotImplementedError

    def merge_top(self, chunk: Json) -> None:
        """Fields of the whole answer."""
        for name, value in chunk.items():
            if name in _OBJECTS and isinstance(value, Mapping):
                known = self._top.setdefault(name, {})
                assert isinstance(known, dict)
                merge_object(known, value, name, ("completion_token_ids",))
            elif name != "choices":
                merge_object(self._top, {name: value}, "")

    def each_choice(self, chunk: Json) -> Iterator[tuple[dict[str, object], Json, str]]:
        """(what is kept of a choice, its part of this chunk, path), for each choice of the chunk."""
        for place, value in enumerate(fields.items(chunk.get("choices") or [], "choices")):
            path = fields.at("choices", place)
            one = fields.mapping(value, path)
            index = fields.count(one, "index", path) or 0
            if index > MAX_CHOICE:
                raise InvalidInput(fields.join(path, "index"), f"{index} is above {MAX_CHOICE}")
            yield self._choices.setdefault(index, {"index": index}), one, path

    def _add(self, text: str) -> None:
        if text:
            self._size += len(text)
            if self._size > self._max_event:
                raise InvalidInput("event", f"longer than {self._max_event} characters")
            self._line.append(text)

    def _end_line(self) -> None:
        line = "".join(self._line)
        self._line.clear()
        if not line:
            data = "\n".join(self._data)
            self._data.clear()
            self._size = 0
            self._event(data)
        elif line.startswith(_FIELD):
            self._data.append(line.removeprefix(_FIELD).removeprefix(" "))

    def _event(self, data: str) -> None:
        if data.strip() == _DONE:
            self.done = True
        elif data and not self.done:
            self.feed(data)

    def _end_text(self) -> None:
        """An event whose empty line has not come: taken if it is whole, left as it is if the stream was cut in it."""
        line = "".join(self._line)
        data = "\n".join([*self._data, line.removeprefix(_FIELD).strip() if line.startswith(_FIELD) else ""]).strip()
        try:
            whole = bool(data) and data != _DONE and isinstance(json.loads(data), dict)
        except (ValueError, RecursionError):
            return
        self._data.clear()
        self._line.clear()
        if whole:
            self._event(data)


def merge_object(kept: dict[str, object], new: Json, path: str, lists: tuple[str, ...] = ()) -> None:
    """Puts `new` over `kept`: nulls say nothing, `lists` are added to, routes in pieces are joined."""
    for name, value in new.items():
        if value is None:
            continue
        if name in lists:
            known = kept.get(name)
            kept[name] = [*(known if isinstance(known, list) else []), *fields.items(value, fields.join(path, name))]
        elif name == "routed_experts":
            kept[name] = _routes(kept.get(name), value, fields.join(path, name))
        else:
            kept[name] = value


def _routes(known: object, new: object, path: str) -> object:
    """The last one, unless both say where they start and the new one starts elsewhere than the first."""
    if known is None or not isinstance(new, Mapping) or new.get("start") is None:
        return new
    pieces = known if isinstance(known, Pieces) else Pieces([known])
    first = pieces[0]
    if not isinstance(first, Mapping) or first.get("start") is None or first["start"] == new["start"]:
        return new
    return Pieces([*pieces, new])
