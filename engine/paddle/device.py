"""What differs between Paddle on a GPU and on the CPU: copies to and from the host, memory counters, idleness.

The CUDA side follows Paddle 3's documentation (`paddle.device.Stream`, `Event`, `stream_guard`; pinned memory). It is
tested against a double of those calls and **has not been run on a GPU**.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.runtime import load_paddle

Tensor = Any
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device in use by tensors, held by Paddle's allocator, and the largest use so far; of all engines
    of this process together."""

    allocated: int
    reserved: int
    peak: int


class HostCopy(Protocol):
    """Tensors on their way to host memory."""

    def result(self) -> Sequence[Array]:
        """one array per tensor; waits for this copy alone. May be called once."""
        ...


class Device(Protocol):
    """The device that an engine computes on."""

    @property
    def kind(self) -> Literal["cpu", "gpu"]: ...

    def begin_copy(self, tensors: Sequence[Tensor], dtype: str | None = None) -> HostCopy:
        """Begins one copy of tensors of one shape to the host, behind what is queued now and beside what is queued
        later. Nobody may write to them until `result`. `dtype`: of Paddle, narrower than theirs and able to hold their
        values; where bytes have a way to go they go in it."""
        ...

    def upload(self, array: Array) -> Tensor:
        """A tensor of `array` on this device; what is queued later sees it whole. The array may change afterwards."""
        ...

    def memory_allocated(self) -> int:
        """Bytes that Paddle holds for tensors on this device, all engines of this process together; exact."""
        ...

    def memory(self) -> Memory: ...

    def synchronize(self) -> None:
        """Returns when the device has finished all queued work, copies too."""
        ...

    def release_unused(self) -> None:
        """Gives freed memory back to the device's driver."""
        ...


def default_device() -> Device:
    """A GPU if Paddle sees one (a CUDA build alone is not one), else the CPU."""
    paddle = load_paddle()
    seen = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    return CudaDevice(paddle) if seen else CpuDevice()


class _Read:
    """On the CPU there is nothing to copy from: the tensors are read when they are asked for."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def result(self) -> Sequence[Array]:
        return [tensor.numpy() for tensor in self._tensors]


class CpuDevice:
    """No streams, no pinned memory; whatever was called has been done."""

    kind: Literal["cpu"] = "cpu"

    def begin_copy(self, tensors: Sequence[Tensor], dtype: str | None = None) -> HostCopy:
        return _Read(tensors)

    def upload(self, array: Array) -> Tensor:
        return load_paddle().to_tensor(array)

    def memory_allocated(self) -> int:
        return int(load_paddle().base.core.host_memory_stat_current_value("Allocated", 0))

    def memory(self) -> Memory:
        core = load_paddle().base.core
        return Memory(
            self.memory_allocated(),
            int(core.host_memory_stat_current_value("Reserved", 0)),
            int(core.host_memory_stat_peak_value("Allocated", 0)),
        )

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def release_unused(self) -> None:
        """Freed memory is the system's at once."""


@dataclass(frozen=True, slots=True)
class _Pinned:
    """A copy to pinned memory. `source` stays until it has been made."""

    source: Tensor
    target: Tensor
    made: Any

    def result(self) -> Sequence[Array]:
        self.made.synchronize()
        return list(np.array(self.target.numpy()))


class CudaDevice:
    """Copies to the host go over a stream of their own to pinned memory, each with an event to wait for."""

    kind: Literal["gpu"] = "gpu"

    def __init__(self, paddle: Any) -> None:
        self._paddle = paddle
        self._copies = paddle.device.Stream()

    def begin_copy(self, tensors: Sequence[Tensor], dtype: str | None = None) -> HostCopy:
        device = self._paddle.device
        with self._paddle.no_grad():
            packed = self._paddle.stack(list(tensors))
            if dtype is not None:
                packed = packed.astype(dtype)
            ready = device.current_stream().record_event()
            self._copies.wait_event(ready)
            with device.stream_guard(self._copies):
                target = packed.pin_memory(blocking=False)
                made = self._copies.record_event()
        return _Pinned(packed, target, made)

    def upload(self, array: Array) -> Tensor:
        pinned = self._paddle.to_tensor(array, place=self._paddle.CUDAPinnedPlace())
        return pinned.cuda(blocking=True)  # nothing else would keep the pinned memory until it has been read

    def memory_allocated(self) -> int:
        return int(self._paddle.device.cuda.memory_allocated())

    def memory(self) -> Memory:
        cuda = self._paddle.device.cuda
        return Memory(int(cuda.memory_allocated()), int(cuda.memory_reserved()), int(cuda.max_memory_allocated()))

    def synchronize(self) -> None:
        self._copies.synchronize()
        self._paddle.device.synchronize()

    def release_unused(self) -> None:
        self._paddle.device.cuda.empty_cache()
