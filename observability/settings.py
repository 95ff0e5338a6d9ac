"""Settings: one root, read from the environment (`MOEBUS_`, nested with `__`) over a TOML file over the defaults.

MOEBUS_KAFKA__BOOTSTRAP_SERVERS=10.0.0.5:9092   MOEBUS_TOPIC_PREFIX=exp7   MOEBUS_CONFIG=/etc/moebus.toml
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import SettingsError as NotDecoded

from moebus.observability.env_names import unknown_names
from moebus.observability.log import get_logger
from moebus.schemas.errors import SettingsError
from moebus.schemas.record.content import CheckLevel
from moebus.schemas.rollout import check_run

_PREFIX = "MOEBUS_"
_log = get_logger(__name__)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KafkaSettings(_Section):
    """Where the brokers are and how to talk to them."""

    bootstrap_servers: str = "127.0.0.1:9092"
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    ssl_cafile: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None


class HttpSettings(_Section):
    """The page of metrics and health that every process serves. Port 0 = a free one, printed at start.
    `url`: where others reach it, `http://host:port`, as members announce it (default: where it listens, a wildcard
    address as loopback)."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    url: str | None = None

    @field_validator("url")
    @classmethod
    def _a_url(cls, text: str | None) -> str | None:
        if text is not None and not re.fullmatch(r"https?://[^\s/?#@]+/?", text):
            raise PydanticCustomError("url", "it is not like http://host:port")
        return text.rstrip("/") if text else None


class LogSettings(_Section):
    """What goes to stderr."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["json", "text"] = "json"


class MirrorSettings(_Section):
    """What the mirrors of a store have in common; sizes in bytes, times in seconds.

    `layout`: an array a layer, all layers in one (`use_fused_put`), or both. `max_model_len`: FastDeploy pads to it; 0:
    as long as they are. `shared_experts`: as FastDeploy counts them when it chooses a type. `run`: the one that is
    mirrored (default: `run`). `max_bytes`: what p2pstore may hold in memory. `queue_bytes`: of ids that wait.
    `timeout`: of one call of p2pstore; `protocol`, `device`, `local_host` (HOST or HOST:PORT): its transport.
    `password`: of Redis.
    """

    layout: Literal["layers", "fused", "both"] = "layers"
    max_model_len: int | None = Field(None, ge=0, le=2**31 - 1)
    shared_experts: int = Field(0, ge=0)
    run: str | None = None
    max_bytes: int = Field(8 << 30, ge=1 << 20)
    queue_bytes: int = Field(16 << 20, ge=1 << 10)
    timeout: float = Field(10.0, gt=0, le=600)
    protocol: Literal["rdma", "tcp"] = "rdma"
    local_host: str = ""
    device: str = ""
    password: SecretStr | None = None


class StoreSettings(_Section):
    """The route store. Sizes in bytes, times in seconds (of the broker's clock for the TTLs).

    `quotas`: bytes that a run may hold in all, as JSON `{"exp-7": 50000000000, "*": 10000000000}`; each partition takes
    its equal part of it, so that every store decides alike. `*`: every run that is not named. `cards`: `config.json`
    of the model of a run, `{"exp-7": "/models/m/config.json"}`; without one the first END of a run says what its is.
    `blobs`: where the bytes of routes lie, `lmdb`, `file:///path` or `s3://bucket/prefix`; `blobs_endpoint`: of an S3
    API that is not Amazon's; `blobs_timeout`: of one request to it. `mirrors`: where copies for readers of FastDeploy
    are kept, `["folder:/path", "p2pstore:redis://host:port"]`.
    """

    data_dir: Path = Path("moebus-store")
    blobs: str = "lmdb"
    blobs_endpoint: str | None = None
    blobs_timeout: float = Field(30.0, gt=0, le=600)
    mirrors: tuple[str, ...] = ()
    mirror: MirrorSettings = MirrorSettings()
    map_bytes: int = Field(8 << 30, ge=1 << 20)
    commit_interval: float = Field(0.02, gt=0, le=10)
    commit_bytes: int = Field(32 << 20, ge=1 << 16)
    open_ttl: float = Field(3600, gt=0)
    keep_ttl: float = Field(86400, gt=0)
    keep: Literal["all", "last_turn"] = "all"
    checks: CheckLevel = "ids"
    quotas: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    cards: dict[str, Path] = Field(default_factory=dict)

    @field_validator("quotas", "cards")
    @classmethod
    def _known_runs(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for run in value:
            if run != "*" or info.field_name == "cards":
                check_run(run)
        return value


class ReaderSettings(_Section):
    """The trainer's reader. `checks`: what it looks at besides what the store has looked at already."""

    checks: CheckLevel = "ids"


class PublisherSettings(_Section):
    """The route publisher.

    `mode`: who sends, a child process or a thread of this one; auto = a process where that is possible.
    `max_bytes` bounds what waits for acknowledgement (default 256 MB; in a process the smaller of that and half of
    what is free where the journal lies). `full`: what submit does then. `high_water`: share of the bound at which the
    callback is called. `receipt_timeout`: seconds after which a record without ack fails (20 h: fences live longer).
    `journal`: file that survives both processes (default: one on /dev/shm that nobody else sees).
    `orphan_seconds`: how long the child goes on sending after its parent died. `sample`: share of the groups whose
    routes are sent; a group is in or out as a whole, the same for every publisher.
    """

    mode: Literal["auto", "process", "thread"] = "auto"
    max_bytes: int | None = Field(None, ge=1 << 20)
    full: Literal["block", "drop"] = "block"
    block_seconds: float = Field(5.0, ge=0)
    high_water: float = Field(0.8, gt=0, le=1)
    receipt_timeout: float = Field(72_000.0, gt=0)
    journal: Path | None = None
    orphan_seconds: float = Field(600.0, ge=0)
    sample: float = Field(1.0, ge=0, le=1)


class FastDeploySettings(_Section):
    """The drop-in for FastDeploy's routing store. `model`: its `config.json`, where FastDeploy does not hand it over;
    `epoch`: of what it publishes, for the owner of the run to raise."""

    model: Path | None = None
    epoch: int = Field(0, ge=0)


class WorkerSettings(_Section):
    """The control worker. Weights are read only from below `weight_roots`: paths, or URLs that fsspec reads."""

    weight_roots: tuple[str, ...] = (".",)
    heartbeat: float = Field(2.0, gt=0, le=5)


class GatewaySettings(_Section):
    """The HTTP gateway. `token`: what callers present as bearer token; without one it listens on loopback alone.
    `legacy_suffixes`: ports of the worker queues of FastDeploy engines of this host, for its legacy paths."""

    token: SecretStr | None = None
    legacy_suffixes: tuple[str, ...] = ()
    legacy_timeout: float = Field(300.0, gt=0)

    @field_validator("token")
    @classmethod
    def _long_enough(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token.get_secret_value()) < 8:
            raise PydanticCustomError("token", "it must have 8 characters or more")
        return token


class Settings(BaseSettings):
    """The root. Frozen; make it once and hand parts of it on."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )
    toml_path: ClassVar[Path | None] = None

    topic_prefix: str = "moebus"
    run: str = "default"
    kafka: KafkaSettings = KafkaSettings()
    http: HttpSettings = HttpSettings()
    log: LogSettings = LogSettings()
    store: StoreSettings = StoreSettings()
    publisher: PublisherSettings = PublisherSettings()
    reader: ReaderSettings = ReaderSettings()
    fastdeploy: FastDeploySettings = FastDeploySettings()
    worker: WorkerSettings = WorkerSettings()
    gateway: GatewaySettings = GatewaySettings()

    @field_validator("topic_prefix")
    @classmethod
    def _legal_prefix(cls, value: str) -> str:
        if not value or len(value) > 200 or not all(c.isascii() and (c.isalnum() or c in "._-") for c in value):
            raise ValueError("1 to 200 of A-Z a-z 0-9 . _ -")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments over environment over TOML; unknown names in the environment warn and are left out."""
        assert isinstance(env_settings, EnvSettingsSource)
        strange = unknown_names(env_settings.env_vars, cls, _PREFIX)
        for name, hint in strange.items():
            _log.warning("settings.unknown", f"{name} is no setting of moebus and is ignored{hint}", name=name)
        env_settings.env_vars = {k: v for k, v in env_settings.env_vars.items() if k.upper() not in strange}
        sources: tuple[PydanticBaseSettingsSource, ...] = (init_settings, env_settings)
        if cls.toml_path is not None:
            sources = (*sources, TomlConfigSettingsSource(settings_cls, cls.toml_path))
        return sources


def load_settings(path: Path | None = None, **overrides: object) -> Settings:
    """Reads the settings. `path`: a TOML file (default: the one named by MOEBUS_CONFIG, else none).

    Raises:
        SettingsError: naming the setting and where it came from, or the file that is not there.
    """
    chosen = path or (Path(os.environ["MOEBUS_CONFIG"]) if os.environ.get("MOEBUS_CONFIG") else None)
    if chosen is not None and not chosen.is_file():
        raise SettingsError(f"there is no settings file {chosen}")

    class _WithFile(Settings):
        toml_path: ClassVar[Path | None] = chosen

    try:
        return _WithFile(**overrides)  # type: ignore[arg-type]
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"setting {name}: {first['msg']}{f' (file {chosen})' if chosen else ''}") from exc
    except NotDecoded as exc:
        raise SettingsError(f"the environment: {_not_json() or exc} is not JSON") from exc
    except ValueError as exc:
        raise SettingsError(f"settings file {chosen}: {exc}") from exc


def _not_json() -> str:
    """Names of the variables that must hold JSON and do not."""
    found = []
    for name, text in os.environ.items():
        section, _, field = name.upper().removeprefix(_PREFIX).lower().partition("__")
        model = Settings.model_fields[section].annotation if section in Settings.model_fields else None
        known = model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else {}
        if name.upper().startswith(_PREFIX) and field in known and get_origin(known[field].annotation) in (dict, tuple):
            try:
                json.loads(text)
            except ValueError:
                found.append(name)
    return ", ".join(found)
