"""Answers to several questions out of one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future


def parts_of(whole: Future[bytes], sizes: Sequence[int]) -> list[Future[bytes]]:
    """One future for each part of `whole`, in order; what becomes of it becomes of all."""
    if len(sizes) == 1:
        return [whole]
    parts: list[Future[bytes]] = [Future() for _ in sizes]

    def share(done: Future[bytes]) -> None:
        error = None if done.cancelled() else done.exception()
        data = b"" if done.cancelled() or error is not None else done.result()
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            if done.cancelled():
                part.cancel()
            elif error is not None:
                part.set_exception(error)
            else:
                part.set_result(data[start : start + size])
            start += size

    whole.add_done_callback(share)
    return parts


def failed(error: Exception) -> Future[bytes]:
    """One that is answered by an error already."""
    future: Future[bytes] = Future()
    future.set_exception(error)
    return future
