"""Checks of this machine: Python, packages, settings, room for the journal."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moebus.cli._doctor import Finding
from moebus.observability.env_names import unknown_names
from moebus.observability.settings import Settings

MIN_PYTHON = (3, 10)
KAFKA = ((3, 0, 12), (3, 1))
"""The range of kafka-python that the adapter is written for."""
JOURNAL_BYTES = 256 << 20
_SHM = Path("/dev/shm")


def check_python(found: tuple[int, int] = sys.version_info[:2]) -> list[Finding]:
    if found < MIN_PYTHON:
        fix = f"install Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer"
        return [Finding("python", "problem", f"Python {found[0]}.{found[1]} is too old", fix)]
    return [Finding("python", "ok", f"Python {platform.python_version()} on {platform.machine()}")]


def installed(name: str) -> str | None:
    """The version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_packages(get: Callable[[str], str | None] = installed) -> list[Finding]:
    return [_kafka(get("kafka-python")), _crc32c(get("crc32c")), _lmdb(get("lmdb")), _paddle(get)]


def _kafka(found: str | None) -> Finding:
    low, high = KAFKA
    fix = "pip install 'kafka-python>=3.0.12,<3.1'"
    if found is None:
        return Finding("packages", "problem", "kafka-python is not installed", fix)
    if not low <= _numbers(found) < high:
        return Finding("packages", "problem", f"kafka-python {found} is not what moebus is written for", fix)
    return Finding("packages", "ok", f"kafka-python {found}")


def _crc32c(found: str | None) -> Finding:
    fix = "pip install --force-reinstall crc32c, from a wheel for this machine"
    if found is None:
        return Finding("packages", "problem", "crc32c is not installed: Kafka runs at 3 MB/s without it", fix)
    try:
        fast = bool(importlib.import_module("crc32c").hardware_based)
    except (ImportError, AttributeError) as error:
        return Finding("packages", "problem", f"crc32c {found} does not work ({error})", fix)
    if not fast:
        return Finding("packages", "warning", f"crc32c {found} computes in software on this CPU: Kafka is slower")
    return Finding("packages", "ok", f"crc32c {found}, in hardware")


def _lmdb(found: str | None) -> Finding:
    if found is None:
        return Finding("packages", "warning", "lmdb is not installed: no `moebus store`", "pip install 'moebus[store]'")
    return Finding("packages", "ok", f"lmdb {found}")


def _paddle(get: Callable[[str], str | None]) -> Finding:
    cpu, gpu = get("paddlepaddle"), get("paddlepaddle-gpu")
    if cpu is not None and gpu is not None:
        text = f"paddlepaddle {cpu} and paddlepaddle-gpu {gpu} overwrite each other"
        return Finding("packages", "problem", text, "uninstall both, then install one of them")
    found = cpu or gpu
    if found is None:
        return Finding("packages", "ok", "PaddlePaddle is not installed; only `--engine paddle` needs it")
    if _numbers(found) < (3,):
        return Finding("packages", "warning", f"PaddlePaddle {found} is too old for `--engine paddle`", "install 3.x")
    return Finding("packages", "ok", f"PaddlePaddle {found}")


def _numbers(text: str) -> tuple[int, ...]:
    """`3.0.12.post1` -> (3, 0, 12)."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_settings(settings: Settings, environ: Mapping[str, str]) -> list[Finding]:
    """`settings` that were loaded; what the environment says beside them."""
    source = environ.get("MOEBUS_CONFIG")
    said = f"topic prefix {settings.topic_prefix}, brokers {settings.kafka.bootstrap_servers}"
    findings = [Finding("settings", "ok", f"{said}{f', file {source}' if source else ''}")]
    for name, hint in unknown_names(dict(environ), Settings, "MOEBUS_").items():
        text = f"{name} is no setting and is ignored{hint}"
        findings.append(Finding("settings", "warning", text, f"unset {name}, or correct its name"))
    findings += [_root(root) for root in settings.worker.weight_roots if "://" not in root and not Path(root).is_dir()]
    return findings


def _root(root: str) -> Finding:
    text = f"the weight root {root} is no folder of this machine: a worker refuses every source below it"
    return Finding("settings", "warning", text, "correct MOEBUS_WORKER__WEIGHT_ROOTS, or mount it")


def check_journal(settings: Settings, shm: Path = _SHM) -> list[Finding]:
    """Room where a publisher puts its journal."""
    chosen = settings.publisher.journal
    place = shm if chosen is None else chosen.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        fix = "set MOEBUS_PUBLISHER__JOURNAL to a file on a disk, or MOEBUS_PUBLISHER__MODE=thread"
        return [Finding("journal", "warning", f"a publisher's journal cannot be written under {place}", fix)]
    free = shutil.disk_usage(place).free
    wanted = settings.publisher.max_bytes or JOURNAL_BYTES
    explicit = settings.publisher.max_bytes is not None
    if free < wanted * (1 if explicit else 2):
        gets = "refuses to start" if explicit else f"gets {free // 2 >> 20} MiB"
        text = f"{place} has {free >> 20} MiB free: a publisher with a journal of {wanted >> 20} MiB {gets}"
        return [Finding("journal", "problem" if explicit else "warning", text, "docker run --shm-size=1g, or a disk")]
    return [Finding("journal", "ok", f"{place} has {free >> 20} MiB free")]
