"""What differs between Paddle on a GPU and on the CPU, as far as this engine needs it."""

from __future__ import annotations

from typing import Any

from moebus.engine.paddle.runtime import load_paddle


class Device:
    """The default device: a GPU if Paddle sees one (a CUDA build alone is not one), else the CPU."""

    def __init__(self) -> None:
        self._paddle: Any = load_paddle()
        self.is_gpu = bool(self._paddle.is_compiled_with_cuda() and self._paddle.device.cuda.device_count() > 0)

    def memory_allocated(self) -> int:
        """Bytes that Paddle holds for tensors on this device, all engines of this process together; exact."""
        if self.is_gpu:
            return int(self._paddle.device.cuda.memory_allocated())
        return int(self._paddle.base.core.host_memory_stat_current_value("Allocated", 0))

    def synchronize(self) -> None:
        """Returns when the device has finished all queued work (the CPU never queues any)."""
        if self.is_gpu:
            self._paddle.device.synchronize()

    def release_unused(self) -> None:
        """Gives freed memory back to the device's driver."""
        if self.is_gpu:
            self._paddle.device.cuda.empty_cache()
