"""Request ids of FastDeploy's chat API: `chatcmpl-{user}-{uuid4}_{choice}`, where `user` carries the rollout id."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moebus.schemas.errors import InvalidInput
from moebus.schemas.rollout import MAX_CHOICE, check_rollout_id

_UUID4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_TAIL = re.compile(rf"(?:(?P<user>.+)-)?(?P<uuid>{_UUID4})_(?P<choice>0|[1-9][0-9]{{0,4}})", re.DOTALL)
_HEAD = "chatcmpl-"


@dataclass(frozen=True, slots=True)
class FastDeployId:
    """What a request id says: the rollout id (structured or opaque), the choice, and the server's uuid."""

    rollout_id: str
    choice: int
    uuid: str


def parse_request_id(text: str) -> FastDeployId:
    """Reads a request id.

    Raises:
        InvalidInput: field `request_id`: not a chat completion id, no uuid4 part, no user part, a choice above
            65,535, or a user part that is too long.
    """
    if not isinstance(text, str) or not text.startswith(_HEAD):
        raise InvalidInput("request_id", f"{text!r} does not start with {_HEAD!r}: not a chat completion id")
    match = _TAIL.fullmatch(text[len(_HEAD) :])
    if match is None:
        raise InvalidInput("request_id", f"{text!r} does not end in a uuid4 and _choice; send `user`, not `request_id`")
    if not match["user"]:
        raise InvalidInput("request_id", f"{text!r} has no user part, so no rollout id; send the rollout id as `user`")
    if int(match["choice"]) > MAX_CHOICE:
        raise InvalidInput("request_id", f"{text!r} names a choice above {MAX_CHOICE}")
    return FastDeployId(check_rollout_id(match["user"], "request_id"), int(match["choice"]), match["uuid"])
