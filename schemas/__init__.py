"""Values and wire formats: what users hold in their hands is named here and loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebus.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from moebus.schemas.errors import InvalidInput as InvalidInput
    from moebus.schemas.errors import MoebusError as MoebusError
    from moebus.schemas.model_card import ModelCard as ModelCard
    from moebus.schemas.rollout import RolloutId as RolloutId
    from moebus.schemas.route_errors import AmbiguousAttempt as AmbiguousAttempt
    from moebus.schemas.route_errors import RouteCorrupt as RouteCorrupt
    from moebus.schemas.route_errors import RouteDeleted as RouteDeleted
    from moebus.schemas.route_errors import RouteError as RouteError
    from moebus.schemas.route_errors import RouteNeverComing as RouteNeverComing
    from moebus.schemas.route_errors import RouteNotYet as RouteNotYet
    from moebus.schemas.route_ref import RouteRef as RouteRef
    from moebus.schemas.route_ref import token_hash as token_hash
    from moebus.schemas.tags import Tag as Tag

_HOME = {
    "AmbiguousAttempt": "moebus.schemas.route_errors",
    "InvalidInput": "moebus.schemas.errors",
    "ModelCard": "moebus.schemas.model_card",
    "MoebusError": "moebus.schemas.errors",
    "RolloutId": "moebus.schemas.rollout",
    "RouteCorrupt": "moebus.schemas.route_errors",
    "RouteDeleted": "moebus.schemas.route_errors",
    "RouteError": "moebus.schemas.route_errors",
    "RouteNeverComing": "moebus.schemas.route_errors",
    "RouteNotYet": "moebus.schemas.route_errors",
    "RouteRef": "moebus.schemas.route_ref",
    "Tag": "moebus.schemas.tags",
    "token_hash": "moebus.schemas.route_ref",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
