"""A double of the calls of Paddle that the CUDA side of the device layer makes. It keeps their order, so that a copy
that is read before its event, or that does not wait for what computed its source, is seen.

`NAMES` are held against the real module by a test: what is not there can not be called there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

NAMES = {
    "": ["stack", "to_tensor", "no_grad", "CUDAPinnedPlace", "device"],
    "device": ["Stream", "Event", "current_stream", "stream_guard", "synchronize", "cuda"],
    "device.Stream": ["wait_event", "record_event", "synchronize"],
    "device.Event": ["synchronize"],
    "device.cuda": ["memory_allocated", "memory_reserved", "max_memory_allocated", "empty_cache", "device_count"],
    "Tensor": ["astype", "pin_memory", "cuda", "numpy", "shape"],
}
"""Attributes by path below `paddle`."""


class Fault(AssertionError):
    """The calls came in an order that is wrong on a GPU."""


class Event:
    def __init__(self, stream: Stream) -> None:
        self.at = (stream, stream.done)

    def synchronize(self) -> None:
        stream, until = self.at
        stream.run(until)


class Stream:
    """A queue of work that runs only when somebody waits for it: the latest moment that a GPU may choose."""

    def __init__(self, name: str = "copies") -> None:
        self.name = name
        self.queue: list[Any] = []
        self.done = 0  # entries queued so far

    def push(self, work: Any) -> None:
        self.queue.append(work)
        self.done += 1

    def run(self, until: int) -> None:
        while self.queue and self.done - len(self.queue) < until:
            self.queue.pop(0)()

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.push(event.synchronize)

    def synchronize(self) -> None:
        self.run(self.done)


class Tensor:
    """On the device unless `pinned`. Its values are there once the stream that makes it has run so far."""

    def __init__(self, cuda: Cuda, make: Any, *, pinned: bool = False, shape: tuple[int, ...] = ()) -> None:
        self._cuda = cuda
        self.shape = list(shape)
        self.pinned = pinned
        self.values: npt.NDArray[Any] | None = None

        def run() -> None:
            self.values = make()

        cuda.current.push(run)

    def there(self) -> npt.NDArray[Any]:
        if self.values is None:
            raise Fault("read before it was made: a stream did not wait for another")
        return self.values

    def astype(self, dtype: str) -> Tensor:
        return Tensor(self._cuda, lambda: self.there().astype(dtype))

    def pin_memory(self, blocking: bool = True) -> Tensor:
        if blocking:
            raise Fault("a blocking copy holds up the step")
        self._cuda.copies += 1
        return Tensor(self._cuda, lambda: self.there().copy(), pinned=True)

    def cuda(self, blocking: bool = True) -> Tensor:
        made = Tensor(self._cuda, lambda: self.there().copy())
        if blocking:
            self._cuda.current.synchronize()
        return made

    def numpy(self) -> npt.NDArray[Any]:
        if not self.pinned:
            self._cuda.current.synchronize()
        return self.there()


class Cuda:
    """The module `paddle` as the device layer sees it. `copies`: to pinned memory so far."""

    def __init__(self) -> None:
        self.compute = Stream("compute")
        self.current = self.compute
        self.streams = [self.compute]
        self.copies = 0
        self.emptied = 0
        self.allocated = 1000
        self.CUDAPinnedPlace = lambda: "pinned"
        self.no_grad = nullcontext
        self.device = SimpleNamespace(
            Stream=self._stream, current_stream=lambda: self.current, stream_guard=self._guard,
            synchronize=self._synchronize,
            cuda=SimpleNamespace(
                memory_allocated=lambda: self.allocated, memory_reserved=lambda: 4096,
                max_memory_allocated=lambda: 2000, empty_cache=self._empty, device_count=lambda: 1,
            ),
        )  # fmt: skip
        self.is_compiled_with_cuda = lambda: True

    def tensor(self, values: npt.NDArray[Any]) -> Tensor:
        """What a kernel on the compute stream makes."""
        return Tensor(self, values.copy, shape=values.shape)

    def stack(self, tensors: list[Tensor]) -> Tensor:
        return Tensor(self, lambda: np.stack([one.there() for one in tensors]))

    def to_tensor(self, values: npt.NDArray[Any], place: str) -> Tensor:
        assert place == "pinned"
        made = Tensor(self, lambda: values, pinned=True)
        made.values = values.copy()
        return made

    def _stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def _guard(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _synchronize(self) -> None:
        self.current.synchronize()

    def _empty(self) -> None:
        self.emptied += 1
