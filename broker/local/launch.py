"""Formatting the storage of a node and starting its process."""

from __future__ import annotations

import base64
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moebus.broker.local.archive import use_options
from moebus.broker.local.errors import LocalKafkaError, with_log
from moebus.broker.local.jars import package_text, write_atomic
from moebus.broker.local.java import Java
from moebus.broker.local.process import spawn
from moebus.broker.local.properties import java_command, server_properties
from moebus.broker.local.state import Node

FORMAT_TIMEOUT = 120.0


def new_cluster_id() -> str:
    """22 characters of base64; never starting with `-`, which Kafka's tools take for an option."""
    while True:
        drawn = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not drawn.startswith("-"):
            return drawn


@dataclass(frozen=True, slots=True)
class Launcher:
    """Everything that starting a node takes besides the node."""

    java: Java
    jars: Sequence[Path]
    archive: Path
    heap_mb: int

    def format(self, node: Node, nodes: Sequence[Node], cluster_id: str) -> None:
        """Writes the node's settings, begins a new log, and formats its storage unless that was done before.

        Raises:
            LocalKafkaError: Kafka's tool did not end with status 0; the text has the end of the log.
        """
        node.directory.mkdir(parents=True, exist_ok=True)
        settings, done = node.directory / "server.properties", node.directory / "formatted"
        write_atomic(settings, server_properties(node, nodes))
        write_atomic(node.directory / "log4j2.xml", package_text("log4j2.xml"))
        if node.log.exists():
            node.log.replace(node.log.with_name("server.log.1"))
        if done.exists():
            return
        shutil.rmtree(node.data, ignore_errors=True)  # half formatted, if it is there
        command = self._command(node, use_options(self.archive))
        command += ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", str(settings)]
        failed = f"formatting the storage of Kafka node {node.id} failed"
        with node.log.open("ab") as log:
            try:
                result = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=FORMAT_TIMEOUT, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise LocalKafkaError(with_log(f"{failed} ({error})", node.log)) from error
        if result.returncode:
            status = f"status {result.returncode} of {self.java.executable}"
            raise LocalKafkaError(with_log(f"{failed} ({status})", node.log))
        done.touch()

    def start(self, node: Node, options: Sequence[str]) -> Node:
        """Starts the node's process with these class archive options; it does not serve yet."""
        command = self._command(node, options)
        command += ["kafka.Kafka", str(node.directory / "server.properties")]
        return replace(node, process=spawn(command, node.log))

    def _command(self, node: Node, options: Sequence[str]) -> list[str]:
        log4j = node.directory / "log4j2.xml"
        return java_command(self.java.executable, self.jars, log4j, node, heap_mb=self.heap_mb, archive=options)
