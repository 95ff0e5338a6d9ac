"""Who a command is for: all, ids, or a label selector. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moebus.schemas.base import echo, json_type
from moebus.schemas.errors import InvalidInput

WORKER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LABEL_NAME = re.compile(r"[A-Za-z0-9._/-]{1,63}")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9._-]{0,63}")
_TERM = re.compile(r"\s*([A-Za-z0-9._/-]{1,63})\s*(?:=\s*([A-Za-z0-9._-]{0,63})|\s+in\s*\(([^()]*)\))\s*")
ALL = "all"
MAX_IDS = 10_000
MAX_LABEL_BYTES = 384


@dataclass(frozen=True, slots=True)
class Term:
    """One condition of a selector: the label `name` has one of `values`."""

    name: str
    values: frozenset[str]


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed target: `ids` where it lists workers, `terms` (all must hold) where it selects by label, else all."""

    ids: frozenset[str] | None = None
    terms: tuple[Term, ...] = ()

    def matches(self, worker_id: str, labels: Mapping[str, str]) -> bool:
        """Whether the worker with this id and these labels is meant."""
        if self.ids is not None:
            return worker_id in self.ids
        return all(labels.get(term.name) in term.values for term in self.terms)


EVERYONE = Target()


def parse_target(value: object) -> Target:
    """The target of a request as written. None and `all` mean every worker; a list is worker ids; a string is a
    selector (`role=rollout,zone in (a,b)`) or one id.

    Raises:
        InvalidInput: field `target`.
    """
    if value is None:
        return EVERYONE
    if isinstance(value, list):
        return _ids(value)
    if not isinstance(value, str):
        raise InvalidInput("target", f"a string or a list of worker ids is needed, not {json_type(value)}")
    text = value.strip()
    if text == ALL:
        return EVERYONE
    if WORKER_ID.fullmatch(text):
        return Target(ids=frozenset({text}))
    return Target(terms=_terms(text))


def check_worker_id(value: str, field: str = "worker_id") -> str:
    """`value` where it can name a worker, or a store. Raises InvalidInput, `field`."""
    if not WORKER_ID.fullmatch(value) or value == ALL:
        raise InvalidInput(field, f"1 to 64 of A-Z a-z 0-9 . _ - are needed (and not 'all'), not {echo(value)}")
    return value


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """`labels` where a selector can name them and a member record holds them. Raises InvalidInput, field `labels`."""
    for name, value in labels.items():
        if not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
            pair = f"{echo(name)}={echo(value)}"
            raise InvalidInput("labels", f"{pair}: at most 63 of A-Z a-z 0-9 . _ - each (/ in names)")
    if sum(len(name) + len(value) + 6 for name, value in labels.items()) > MAX_LABEL_BYTES:
        raise InvalidInput("labels", f"more than {MAX_LABEL_BYTES} bytes in all")
    return dict(labels)


def _ids(value: list[object]) -> Target:
    if not value:
        raise InvalidInput("target", "an empty list; leave it out to mean all")
    if len(value) > MAX_IDS:
        raise InvalidInput("target", f"{len(value)} ids, at most {MAX_IDS}")
    ids: set[str] = set()
    for item in value:
        if not isinstance(item, str) or not WORKER_ID.fullmatch(item):
            raise InvalidInput("target", f"not a worker id: {echo(item)}")
        ids.add(item)
    return Target(ids=frozenset(ids))


def _terms(text: str) -> tuple[Term, ...]:
    terms: list[Term] = []
    position = 0
    while True:
        match = _TERM.match(text, position)
        if match is None:
            forms = "neither an id, 'all' nor a selector such as role=rollout,zone in (a,b)"
            raise InvalidInput("target", f"{forms}: {echo(text)}")
        terms.append(_term(match))
        position = match.end()
        if position == len(text):
            return tuple(terms)
        if text[position] != ",":
            raise InvalidInput("target", f"a comma is needed at character {position + 1} of {echo(text)}")
        position += 1


def _term(match: re.Match[str]) -> Term:
    name, single, several = match.group(1), match.group(2), match.group(3)
    values = [single] if several is None else [part.strip() for part in several.split(",")]
    for value in values:
        if not _LABEL_VALUE.fullmatch(value) or (several is not None and not value):
            raise InvalidInput("target", f"label {name}: not a value: {echo(value)}")
    return Term(name, frozenset(values))
