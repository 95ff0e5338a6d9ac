"""One real Apache Kafka for the whole run, and fresh names for each test."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import settings

from moebus.broker.local import LocalCluster, ToolMissing

RUN = "PYTEST_KAFKA_RUN"
"""Environment variable `PID-RANDOM` of the process that was started first; the workers of pytest-xdist inherit it."""


def pytest_configure() -> None:
    # How long an example takes says how busy the machine is; what is slow has a test of its own.
    settings.register_profile("moebus", deadline=None)
    settings.load_profile("moebus")
    os.environ.setdefault(RUN, f"{os.getpid()}-{uuid.uuid4().hex[:8]}")


def pytest_unconfigure() -> None:
    # Of several workers none knows when the last test has ended; the process that started them does.
    if _owner() == os.getpid():
        directory = _directory()
        del os.environ[RUN]
        broker = LocalCluster.load(directory)
        if broker is not None:
            broker.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def kafka_broker() -> LocalCluster:
    """A broker of one node, `.bootstrap`, for the whole run; use fresh topics (`topic_prefix`) in each test.

    It dies with the test run, also when that is killed. Without Java or Maven the test is skipped, under CI it fails.
    """
    try:
        return LocalCluster.start(_directory(), name="tests", owner=_owner())
    except ToolMissing as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def topic_prefix() -> str:
    """A topic prefix that no other test of any run uses."""
    return f"t{uuid.uuid4().hex[:12]}"


def _directory() -> Path:
    return Path(tempfile.gettempdir()) / f"moebus-tests-{os.environ[RUN]}"


def _owner() -> int:
    return int(os.environ[RUN].partition("-")[0])
