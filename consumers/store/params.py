"""Query parameters of the store's HTTP: strict, every fault named."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moebus.consumers.store.answers import BodyFormat, Question
from moebus.schemas.attempt import parse_attempt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.rollout import MAX_CHOICE, MAX_EPOCH, check_group, check_prefix, check_run, rollout_key

MAX_WAIT = 60.0
MAX_LIMIT = 10_000
_ROWS = 2**31 - 1
_ROLLOUT = (
    "choice", "attempt", "group", "partition", "layers", "start", "stop", "format", "min_offset", "wait",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AskedRollout:
    question: Question
    form: BodyFormat
    wait: float


@dataclass(frozen=True, slots=True)
class AskedListing:
    run: str
    prefix: str | None
    after: bytes
    limit: int


@dataclass(frozen=True, slots=True)
class AskedDelete:
    run: str
    prefix: str
    epoch: int
    timeout: float


def rollout(path: Mapping[str, str], query: Mapping[str, str]) -> AskedRollout:
    """Of `GET /v1/routes/{run}/{rollout_id}`, or with both in the query. Raises InvalidInput, as the others here."""
    only(query, _ROLLOUT if path else ("run", "rollout_id", *_ROLLOUT))
    names = path or {"run": _needed(query, "run"), "rollout_id": _needed(query, "rollout_id")}
    key = rollout_key(names["run"], names["rollout_id"], _number(query, "choice", MAX_CHOICE) or 0)
    group = check_group(query["group"]) if "group" in query else None
    question = Question(
        key,
        attempt=parse_attempt(query["attempt"]) if "attempt" in query else None,
        group=group,
        partition=_number(query, "partition", _ROWS),
        layers=_layers(query["layers"]) if "layers" in query else None,
        start=_number(query, "start", _ROWS) or 0,
        stop=_number(query, "stop", _ROWS),
        min_offset=_number(query, "min_offset", MAX_EPOCH),
    )
    form = query.get("format", "npy")
    if form not in ("npy", "raw"):
        raise InvalidInput("format", f"{form!r} is unknown; known are npy and raw")
    return AskedRollout(question, "npy" if form == "npy" else "raw", _seconds(query, "wait", 0.0))


def listing(query: Mapping[str, str]) -> AskedListing:
    only(query, ("run", "prefix", "limit", "after"))
    limit = _number(query, "limit", MAX_LIMIT)
    if limit == 0:
        raise InvalidInput("limit", f"1 to {MAX_LIMIT} are allowed")
    prefix = check_prefix(query["prefix"]) if "prefix" in query else None
    return AskedListing(check_run(_needed(query, "run")), prefix, _cursor(query.get("after")), limit or 1000)


def delete(query: Mapping[str, str]) -> AskedDelete:
    only(query, ("run", "prefix", "epoch", "timeout"))
    run, prefix = check_run(_needed(query, "run")), check_prefix(_needed(query, "prefix"))
    return AskedDelete(run, prefix, _number(query, "epoch", MAX_EPOCH) or 0, _seconds(query, "timeout", 30.0))


def once(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The parameters of a query. Raises InvalidInput for one that is given twice: which one is meant?"""
    query: dict[str, str] = {}
    for name, value in pairs:
        if name in query:
            raise InvalidInput(name, "given twice")
        query[name] = value
    return query


def only(query: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Raises InvalidInput for any other parameter."""
    for name in query:
        if name not in known:
            raise InvalidInput(name, f"unknown parameter; known are {', '.join(known) or 'none'}")


def _needed(query: Mapping[str, str], name: str) -> str:
    if name not in query:
        raise InvalidInput(name, "missing")
    return query[name]


def _number(query: Mapping[str, str], name: str, highest: int) -> int | None:
    if name not in query:
        return None
    text = query[name]
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > highest:
        raise InvalidInput(name, f"{text[:40]!r} is not a number from 0 to {highest}")
    return int(text)


def _seconds(query: Mapping[str, str], name: str, default: float) -> float:
    if name not in query:
        return default
    text = query[name]
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", text):
        raise InvalidInput(name, f"{text[:40]!r} is not a number of seconds")
    return min(float(text), MAX_WAIT)


def _layers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,5}(,[0-9]{1,5})*", text):
        raise InvalidInput("layers", f"{text[:40]!r} is not a list of layer numbers like 3,4,5")
    layers = tuple(int(part) for part in text.split(","))
    if len(set(layers)) != len(layers):
        raise InvalidInput("layers", "a layer is named twice")
    return layers


def _cursor(text: str | None) -> bytes:
    try:
        return base64.b64decode((text or "").encode("ascii"), b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidInput("after", "not the `next` of an earlier page") from None
