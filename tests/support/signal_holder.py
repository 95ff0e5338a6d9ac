"""A process that holds one legacy signal: `python -m tests.support.signal_holder NAME SUFFIX FOLDER [PASSES_ON]`.

It appends a line to FOLDER/NAME for each effect that it begins and ends. While FOLDER/hold-NAME exists an effect does
not end, while FOLDER/fail exists it fails. Ends with its stdin.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from moebus.engine.legacy_signals import Holder, Status


def main(name: str, suffix: str, folder: Path, passes_on: str | None = None) -> None:
    """Runs until it is killed or stdin ends."""
    log = folder / name

    def say(text: str) -> None:
        with log.open("a") as file:
            file.write(text + "\n")

    def effect(asked: Status) -> None:
        say(f"begin {asked.name}")
        while (folder / f"hold-{name}").exists():
            time.sleep(0.005)
        if (folder / "fail").exists():
            raise OSError("told to fail")
        say(f"end {asked.name}")

    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with Holder(name, suffix, effect, passes_on=passes_on) as holder:
        say("ready")
        while True:
            if not holder.step():
                time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
