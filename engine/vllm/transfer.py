"""vLLM's weight transfer: the four steps of its protocol, which the trainer takes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moebus.engine.port import (
    Deadline,
    EngineFailed,
    EngineRefused,
    EngineTainted,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnknown,
    EngineUnreachable,
    Unsupported,
)
from moebus.engine.vllm.api import VllmApi
from moebus.engine.vllm.state import EMPTY, MIXED, Now, VllmState
from moebus.engine.vllm.weights import VllmWeights
from moebus.schemas.errors import MoebusError
from moebus.schemas.tags import Tag

_PATHS = {
    "init": "/init_weight_transfer_engine",
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
}
_WHOLE = (EngineRefused, EngineUnauthorized, Unsupported, EngineUnreachable, EngineTimeout)
"""Errors that come before the first effect."""


class VllmTransfer:
    """Used by the worker's thread. `update` blocks until the trainer has sent what its info lists."""

    def __init__(self, api: VllmApi, state: VllmState, weights: VllmWeights) -> None:
        self._api = api
        self._state = state
        self._weights = weights
        self._left_open = False
        """An update broke: the server may still hold it open, and would refuse the next one."""

    def step(self, now: Now, step: str, version: str | None, info: Mapping[str, object], deadline: Deadline) -> None:
        """Raises EngineRefused: out of order, or by the server before any effect.  EngineTainted: cut in the middle."""
        self._check(now, step, version)
        if step == "init":
            self._api.transfer(_PATHS[step], {"init_info": dict(info)}, deadline)
            return
        if not self._state.known.resident[Tag.WEIGHT]:
            raise EngineFailed("transfer: the weights are asleep; wake them first")
        if step == "start":
            self._start(now, deadline)
        elif step == "update":
            self._cut_taints(step, now.life, {"update_info": dict(info)}, deadline)
        else:
            self._finish(now.life, version, deadline)

    def _check(self, now: Now, step: str, version: str | None) -> None:
        if step not in _PATHS:
            raise EngineRefused(f"step: {step!r} is none of {', '.join(_PATHS)}")
        if version in (EMPTY, MIXED):
            raise EngineRefused(f"version: {version!r} is what moebus calls weights that are no version")
        if step != "init":
            now.need_pause("transfer")

    def _start(self, now: Now, deadline: Deadline) -> None:
        """One of this worker's that is open, or was left open, is closed first: a start begins anew. The server refuses
        a second update of its own accord, which is then somebody else's; nothing is written before a tensor comes."""
        life = now.life
        try:
            if now.belief.open_update or now.found.tainted or self._left_open:
                self._close(deadline)
            self._api.transfer(_PATHS["start"], None, deadline)
        except EngineUnknown as error:
            self._broken(life)
            self._weights.mark(MIXED, life, deadline)
            raise EngineTainted(f"transfer start: {error}") from error
        self._left_open = False
        self._state.change(life, lambda old: replace(old, open_update=True))
        self._weights.mark(MIXED, life, deadline)

    def _close(self, deadline: Deadline) -> None:
        try:
            self._api.transfer(_PATHS["finish"], {"weight_version": None}, deadline)
        except (EngineFailed, EngineRefused):  # nothing was open
            return

    def _broken(self, life: str) -> None:
        self._left_open = True
        self._state.change(life, lambda old: replace(old, open_update=False))

    def _finish(self, life: str, version: str | None, deadline: Deadline) -> None:
        try:
            self._cut_taints("finish", life, {"weight_version": version}, deadline)
        except EngineTainted:
            if not self._finished(version):
                raise
        self._left_open = False
        self._state.change(life, lambda old: replace(old.loaded(version, None), open_update=False))
        if self._state.labelled and self._api.version() != version and version is not None:
            self._weights.mark(version, life, deadline)

    def _finished(self, version: str | None) -> bool:
        """The server names the version with the end of the update, so that proves it."""
        try:
            return self._state.labelled and version is not None and self._api.version() == version
        except MoebusError:
            return False

    def _cut_taints(self, step: str, life: str, body: Mapping[str, Any], deadline: Deadline) -> None:
        try:
            self._api.transfer(_PATHS[step], body, deadline)
        except _WHOLE:
            raise
        except (EngineFailed, EngineUnknown) as error:
            self._broken(life)
            raise EngineTainted(f"transfer {step}: {error}; the weights may be mixed") from error
