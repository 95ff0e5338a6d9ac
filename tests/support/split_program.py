"""One end of the prefill / decode split as a process of its own.

    python -m tests.support.split_program decode FOLDER COUNT     listens on loopback, prints `port N`; ends after COUNT
    python -m tests.support.split_program prefill PORT [cut]      sends all of PROMPTS; `cut`: dies in the middle of one

Nothing but the socket is between them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import BinaryIO

import numpy as np

from moebus.engine.paddle import Handover, HandoverRefused, PaddleEngine
from moebus.engine.port import Generation, Prompt
from tests.support.generate import random_prompts
from tests.support.paddle import SMALL

PROMPTS = [replace(one, seed=index) for index, one in enumerate(random_prompts(5, (20, 90), 128, 6, temperature=1.0))]
SEED = 5
TIMEOUT = 60.0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def save(folder: Path, result: Generation) -> None:
    """One file, whole or not at all; numbers only."""
    assert result.routes is not None
    text = np.asarray([result.finish_reason, *(f"{start} {version}" for start, version in result.versions)])
    target = folder / f"{result.request_id}.npz"
    with target.with_suffix(".draft").open("wb") as out:
        np.savez(
            out, tokens=result.token_ids, logprobs=result.logprobs, routes=result.routes, text=text,
            cached=np.asarray([result.cached_tokens]),
        )  # fmt: skip
    target.with_suffix(".draft").rename(target)


def decode(folder: Path, count: int) -> None:
    engine = PaddleEngine.create(replace(SMALL, block_size=16, num_blocks=64), seed=SEED)
    prompts = {prompt.request_id: prompt for prompt in PROMPTS}
    threads: list[Thread] = []

    def go_on(handover: Handover, prompt: Prompt) -> None:
        save(folder, engine.decode(handover, prompt, TIMEOUT))

    with socket.create_server(("127.0.0.1", 0)) as server:
        say(f"port {server.getsockname()[1]}")
        while len(threads) < count:
            connection, _ = server.accept()
            connection.settimeout(TIMEOUT)
            with connection, connection.makefile("rb") as stream:
                try:
                    while len(threads) < count:
                        handover = Handover.read_from(stream)
                        threads.append(Thread(target=go_on, args=(handover, prompts[handover.head.request_id])))
                        threads[-1].start()
                except HandoverRefused as error:
                    say(f"refused {error}")
    for thread in threads:
        thread.join()
    engine.close()


def prefill(port: int, cut: bool) -> None:
    engine = PaddleEngine.create(SMALL, seed=SEED)
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as connection, connection.makefile("wb") as out:
        for prompt in PROMPTS:
            handover = engine.prefill(prompt, TIMEOUT)
            if cut:
                _half(handover, out)
            handover.write_to(out)
    engine.close()


def _half(handover: Handover, out: BinaryIO) -> None:
    whole = BytesIO()
    handover.write_to(whole)
    out.write(whole.getvalue()[: len(whole.getvalue()) // 2])
    out.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "decode":
        decode(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        prefill(int(sys.argv[2]), "cut" in sys.argv)
