"""The one import of Paddle, with what it does to the process undone."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moebus.schemas.errors import FatalError

MIN_MAJOR = 3
_HOW = (
    "install the CPU wheel with `pip install 'moebus[cpu]'`, or paddlepaddle-gpu >= 3.0 from Paddle's own package"
    " index (never both in one environment)"
)
_SIGNALS = (signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loaded: list[Any] = []


class PaddleUnavailable(FatalError):
    """Paddle is not installed, too old, or does not import; the text says what to install."""

    exit_code = 2


def load_paddle() -> Any:
    """The `paddle` module (>= 3), imported at the first call.

    The import leaves no trace: OMP_NUM_THREADS (which children would inherit), the root logger's handlers and
    Python's signal handlers are as before. Call it first from the main thread: elsewhere Python cannot put a
    signal handler of its own back.

    Raises:
        PaddleUnavailable
    """
    with _lock:
        if not _loaded:
            _loaded.append(_import())
        return _loaded[0]


def _import() -> Any:
    with _undone():
        try:
            paddle = importlib.import_module("paddle")
        except ModuleNotFoundError as error:
            if error.name == "paddle":
                raise PaddleUnavailable(f"the paddle engine needs PaddlePaddle: {_HOW}") from error
            raise PaddleUnavailable(
                f"PaddlePaddle does not import because {error.name!r} is missing: {_HOW}"
            ) from error
        except (ImportError, OSError) as error:
            raise PaddleUnavailable(f"PaddlePaddle is installed but does not import ({error}): {_HOW}") from error
        check_version(str(getattr(paddle, "__version__", "")))
        paddle.disable_signal_handler()
    return paddle


def check_version(version: str) -> None:
    """Raises PaddleUnavailable unless `version` is 3.0 or later, or 0.0.0 (a build of the development branch)."""
    major = version.split(".")[0]
    if version.startswith("0.0.0") or (major.isdigit() and int(major) >= MIN_MAJOR):
        return
    raise PaddleUnavailable(
        f"PaddlePaddle {version or '(no version)'} is too old, {MIN_MAJOR}.0 or later is needed: {_HOW}"
    )


@contextmanager
def _undone() -> Iterator[None]:
    threads = os.environ.get("OMP_NUM_THREADS")
    root = logging.getLogger()
    handlers = list(root.handlers)
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No ccache found")
            yield
    finally:
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = threads
        for handler in [h for h in root.handlers if h not in handlers]:
            root.removeHandler(handler)
        _restore_signals(previous)


def _restore_signals(previous: dict[signal.Signals, Any]) -> None:
    """Paddle replaced Python's handlers with C ones, and its switch-off replaced those with the system's default."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in previous.items():
            if handler is not None:  # None: not one of Python's
                signal.signal(number, handler)
    elif callable(previous[signal.SIGTERM]):
        _log.warning("Paddle was imported outside the main thread: the handler of SIGTERM is lost, install it again")
