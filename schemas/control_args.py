"""Methods of the control plane and one model of arguments per method (design section 3.2)."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, StringConstraints, WithJsonSchema, model_validator

from moebus.schemas.base import StrictModel, echo, json_type
from moebus.schemas.errors import InvalidInput
from moebus.schemas.tags import ALL_TAGS, Tag, parse_tags
from moebus.schemas.target import check_labels, check_worker_id

PauseMode = Literal["abort", "wait", "keep"]
Level = Literal["offload", "discard"]
WakeWeights = Literal["restore", "empty"]
CacheMode = Literal["reset", "keep", "recompute"]
TransferStep = Literal["init", "start", "update", "finish"]
Verdict = Literal["commit", "void"]


class Method(str, Enum):
    """What may be asked of a worker."""

    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKEUP = "wakeup"
    UPDATE_WEIGHTS = "update_weights"
    DECIDE = "decide"
    TRANSFER_WEIGHTS = "transfer_weights"
    RESET_CACHE = "reset_cache"
    ABORT_REQUESTS = "abort_requests"
    STATUS = "status"
    BEGIN_RUN = "begin_run"
    HELLO = "hello"

    def __str__(self) -> str:
        return self.value


STATE_CHANGING = frozenset(
    {
        Method.PAUSE,
        Method.RESUME,
        Method.SLEEP,
        Method.WAKEUP,
        Method.UPDATE_WEIGHTS,
        Method.TRANSFER_WEIGHTS,
        Method.BEGIN_RUN,
    }
)
"""Methods that `expect.after` watches for and that are refused between stage and decision."""


def check_request_id(value: object) -> str:
    """A request id: 1 to 255 printable characters. Raises InvalidInput, field `request_id`."""
    if not isinstance(value, str):
        raise InvalidInput("request_id", f"a string is needed, not {json_type(value)}")
    if not 1 <= len(value) <= 255 or not value.isprintable():
        raise InvalidInput("request_id", f"1 to 255 printable characters are needed, not {echo(value)}")
    return value


def check_version(value: object) -> str:
    """A weight version: any text of 1 to 200 bytes of UTF-8. Raises InvalidInput, field `version`."""
    if not isinstance(value, str):
        raise InvalidInput("version", f"a string is needed, not {json_type(value)}")
    if not value.isprintable() or not 1 <= len(value.encode("utf-8", "replace")) <= 200:
        raise InvalidInput("version", f"1 to 200 bytes of printable UTF-8 are needed, not {echo(value)}")
    return value


def _method(value: object) -> Method:
    if not isinstance(value, str):
        raise InvalidInput("method", f"a string is needed, not {json_type(value)}")
    try:
        return Method(value)
    except ValueError:
        raise InvalidInput("method", f"unknown method {echo(value)}; known are {', '.join(Method)}") from None


def _worker(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput("worker", f"a string is needed, not {json_type(value)}")
    return check_worker_id(value)


def _tags(value: object) -> tuple[Tag, ...]:
    return parse_tags([str(tag) for tag in value] if isinstance(value, tuple) else value)


_TAGS_SCHEMA = {
    "description": "weight, kv_cache: comma-separated or a list; absent means both",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"enum": ["weight", "weights", "kv_cache"]}, "minItems": 1},
        {"type": "null"},
    ],
}
RequestId = Annotated[
    str, BeforeValidator(check_request_id), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 255})
]
Version = Annotated[
    str, BeforeValidator(check_version), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 200})
]
Tags = Annotated[tuple[Tag, ...], BeforeValidator(_tags), WithJsonSchema(_TAGS_SCHEMA)]
MethodField = Annotated[
    Method, BeforeValidator(_method), WithJsonSchema({"type": "string", "enum": [str(word) for word in Method]})
]
WorkerId = Annotated[
    str, BeforeValidator(_worker), WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"})
]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z:_-]{1,128}$")]
Source = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class NoArgs(StrictModel):
    """Arguments of a method that takes none."""


class PauseArgs(StrictModel):
    mode: PauseMode = "abort"


class SleepArgs(StrictModel):
    tags: Tags = ALL_TAGS
    level: Level = "offload"
    mode: PauseMode = "abort"


class WakeupArgs(StrictModel):
    tags: Tags = ALL_TAGS
    weights: WakeWeights = "restore"
    resume: bool = False


class UpdateWeightsArgs(StrictModel):
    """`source` None: the engine's own. `digest`: of all weights, as `Staged.weights_digest`. `options`: of the engine's
    own kind (FastDeploy's `verify_checksum`, `rsync_config`), opaque to moebus."""

    version: Version
    source: Source | None = None
    digest: Digest | None = None
    cache: CacheMode = "reset"
    options: dict[str, JsonValue] | None = None


class DecideArgs(StrictModel):
    request_id: RequestId
    decision: Verdict


class TransferWeightsArgs(StrictModel):
    """`info` is opaque to moebus. `version` is needed by `finish`."""

    step: TransferStep
    version: Version | None = None
    info: dict[str, JsonValue] = Field(default_factory=dict)
    cache: CacheMode = "reset"

    @model_validator(mode="after")
    def _finish_names_version(self) -> TransferWeightsArgs:
        if self.step == "finish" and self.version is None:
            raise InvalidInput("version", "finish needs the version that was transferred")
        return self


class AbortRequestsArgs(StrictModel):
    ids: list[Annotated[str, StringConstraints(min_length=1, max_length=512)]] | None = None
    all: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> AbortRequestsArgs:
        if self.all == (self.ids is not None):
            raise InvalidInput("ids", "exactly one of ids and all=true is needed")
        if self.ids is not None and not self.ids:
            raise InvalidInput("ids", "empty; say all=true to abort every request")
        return self


class BeginRunArgs(StrictModel):
    run: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class HelloArgs(StrictModel):
    worker: WorkerId
    boot: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    engine: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    labels: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _labels_hold(self) -> HelloArgs:
        check_labels(self.labels)
        return self


Args = (
    NoArgs
    | PauseArgs
    | SleepArgs
    | WakeupArgs
    | UpdateWeightsArgs
    | DecideArgs
    | TransferWeightsArgs
    | AbortRequestsArgs
    | BeginRunArgs
    | HelloArgs
)

ARGS: dict[Method, type[StrictModel]] = {
    Method.PAUSE: PauseArgs,
    Method.RESUME: NoArgs,
    Method.SLEEP: SleepArgs,
    Method.WAKEUP: WakeupArgs,
    Method.UPDATE_WEIGHTS: UpdateWeightsArgs,
    Method.DECIDE: DecideArgs,
    Method.TRANSFER_WEIGHTS: TransferWeightsArgs,
    Method.RESET_CACHE: NoArgs,
    Method.ABORT_REQUESTS: AbortRequestsArgs,
    Method.STATUS: NoArgs,
    Method.BEGIN_RUN: BeginRunArgs,
    Method.HELLO: HelloArgs,
}


def parse_args(method: Method, value: Any) -> StrictModel:
    """The arguments of `method`; None means none. Raises InvalidInput, fields `args.<name>`."""
    return ARGS[method].parse({} if value is None else value, at="args")
