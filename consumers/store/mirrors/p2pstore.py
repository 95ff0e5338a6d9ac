"""p2pstore as a mirror (extra `p2pstore`), with the keys that FastDeploy puts: `{rollout id}` (fused, the bytes of
[L, M, K]) and `{rollout id}_{layer}` (an array [M, K] each).

p2pstore keeps what is put in the memory of the process that put it; Redis only knows where. So a mirror begins with
nothing, and its size is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moebus.consumers.store.mirrors.port import Layout, MirrorDown, Shelf, Target
from moebus.observability.settings import MirrorSettings
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import SettingsError

_URL = re.compile(r"redis(\+sentinel|\+cluster)?://[^\s/@?#]+(/[^\s@?#]*)?")
_SENTINEL = "88888888"
"""p2pstore drops such keys and says that it kept them."""


class P2PTarget(Target):
    """See `Target`. Connects when it is first used, and again after a failure of Redis."""

    kind = "p2pstore"
    forgets = True

    def __init__(self, url: str, settings: MirrorSettings) -> None:
        """Raises SettingsError: p2pstore is not installed, or the URL is not one that it knows."""
        check_url(url)
        self.where = f"p2pstore:{url}"
        self._url = url
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._client: Any = None

    def refuses(self, rollout_id: str, layout: Layout) -> str | None:
        if _SENTINEL in rollout_id:
            return f"p2pstore keeps no key with {_SENTINEL}"
        if layout == "both" and re.search(r"_\d+\Z", rollout_id):
            return "the id ends like the key of a layer"
        return None

    def put(self, shelf: Shelf, fused: RouteArray) -> None:
        if shelf.split:
            for layer, rows in enumerate(fused):
                self._put(f"{shelf.rollout_id}_{layer}", np.ascontiguousarray(rows))
        if shelf.fused:
            self._put(shelf.rollout_id, fused.tobytes())

    def delete(self, shelves: Sequence[Shelf]) -> None:
        keys = [key for shelf in shelves for key in _keys(shelf)]
        outcome = self._call(lambda client: client.delete_batch(keys))
        left = [key for key in keys if not outcome.get(key)]
        if left:
            raise MirrorDown(f"{self.where}: {left[0]} cannot be deleted")

    def has(self, shelf: Shelf) -> bool:
        return all(self._call(lambda client, key=key: client.exists(key)) for key in _keys(shelf))

    def life(self) -> str:
        """Redis's own name for its process: started again without a file, it holds nothing. p2pstore has no call for
        that, so this asks its connection."""
        return str(self._call(_run_id))

    def close(self) -> None:
        self._drop()
        self._loop.close()

    def _put(self, key: str, data: object) -> None:
        if not self._call(lambda client: client.put(key, data)):
            raise MirrorDown(f"{self.where}: {key} was not taken")

    def _call(self, make: Any) -> Any:
        try:
            if self._client is None:
                self._client = _connect(self._url, self._settings)
            return self._loop.run_until_complete(asyncio.wait_for(make(self._client), self._settings.timeout))
        except Exception as error:  # what p2pstore, its transports and Redis may raise is not told anywhere
            unable = self._client is None and self._settings.protocol == "rdma"
            hint = "; where there is no RDMA, set store.mirror.protocol to tcp" if unable else ""
            raise MirrorDown(f"{self.where}: {type(error).__name__}: {str(error)[:200]}{hint}") from error

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            client.close()
        finally:
            for transport in client.transports:
                server = getattr(transport, "_server_socket", None)
                if server is not None:  # TCP: it leaves its socket open
                    with contextlib.suppress(OSError):
                        server.shutdown(socket.SHUT_RDWR)
                    server.close()


async def _run_id(client: Any) -> str:
    redis = client.metadata_client._client
    info = await asyncio.get_running_loop().run_in_executor(None, redis.info, "server")
    nodes = [info] if "run_id" in info else info.values()  # a cluster answers by node
    return " ".join(sorted(str(node["run_id"]) for node in nodes))


def _keys(shelf: Shelf) -> list[str]:
    layers = [f"{shelf.rollout_id}_{layer}" for layer in range(shelf.layers)] if shelf.split else []
    return [*layers, *([shelf.rollout_id] if shelf.fused else [])]


def check_url(url: str) -> None:
    """Raises SettingsError: not a URL of a metadata server, or p2pstore is not installed."""
    if _URL.fullmatch(url) is None:
        raise SettingsError(
            f"store.mirrors: {url.rpartition('@')[2]!r} is not like redis://host:port (also redis+sentinel, "
            "redis+cluster; a password is a setting of its own, store.mirror.password)"
        )
    try:
        with _silence():
            import p2pstore  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            f"store.mirrors: p2pstore needs the extra p2pstore and a transfer engine: {error}"
        ) from None


def _connect(url: str, settings: MirrorSettings) -> Any:
    with _silence():
        from p2pstore import P2PClient, P2PConfig

    config = P2PConfig(
        metadata_server=url, protocol=settings.protocol, local_host=_address(settings.local_host),
        device=settings.device, redis_socket_timeout=settings.timeout,
        redis_socket_connect_timeout=min(5.0, settings.timeout),
    )  # fmt: skip
    if settings.password is not None:
        config.redis_password = settings.password.get_secret_value()
    with _silence():
        return P2PClient(config)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Its loggers make a folder where the process happens to run, which is wanted only where somebody named one; told
    not to, they say so on stdout."""
    if not os.environ.get("P2P_LOG_DIR"):
        os.environ.setdefault("P2PSTORE_DISABLE_LOG", "1")
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _address(text: str) -> str:
    """host:port; a free port where none is named."""
    host, _, port = (text or "127.0.0.1").partition(":")
    if port:
        return f"{host}:{port}"
    with socket.socket() as free:
        free.bind((host, 0))
        return f"{host}:{free.getsockname()[1]}"
