"""The device layer: what the CPU does plainly, and the calls that the CUDA side makes, on a double of them.

Nothing here runs on a GPU. The double's names are those of the Paddle that is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moebus.engine.paddle import device as device_module
from moebus.engine.paddle.capture import RouteCapture, RouteMissing
from moebus.engine.paddle.device import CpuDevice, CudaDevice, Device, Memory, default_device
from moebus.engine.paddle.runtime import load_paddle
from moebus.schemas.model_card import ModelCard
from tests.support.cuda import NAMES, Cuda, Fault
from tests.support.paddle import needs_paddle


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("path", NAMES)
def test_the_double_has_only_names_that_paddle_has(path: str, cuda: Cuda) -> None:
    real, double = load_paddle(), cuda
    found: Any = real
    for part in path.split(".") if path else []:
        found = getattr(found, part)
    for name in NAMES[path]:
        assert hasattr(found, name), f"paddle.{path}.{name}"
    if path in ("", "device", "device.cuda"):
        twin: Any = double
        for part in path.split(".") if path else []:
            twin = getattr(twin, part)
        assert {name for name in NAMES[path] if not hasattr(twin, name)} <= {"Event"}


@needs_paddle
@pytest.mark.paddle
def test_this_machine_gets_the_cpu_or_its_gpu(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    assert default_device().kind == ("gpu" if load_paddle().device.cuda.device_count() else "cpu")
    monkeypatch.setattr(device_module, "load_paddle", lambda: cuda)
    assert default_device().kind == "gpu"
    cuda.device.cuda.device_count = lambda: 0  # a CUDA build on a machine without a GPU
    assert default_device().kind == "cpu"


@needs_paddle
@pytest.mark.paddle
def test_the_cpu_side() -> None:
    paddle, device = load_paddle(), CpuDevice()
    before = device.memory_allocated()
    tensors = [paddle.to_tensor(np.arange(6, dtype=np.float32) + layer) for layer in range(3)]
    assert device.memory_allocated() - before >= 3 * 24
    copied = device.begin_copy(tensors).result()
    assert [one.tolist() for one in copied] == [(np.arange(6) + layer).tolist() for layer in range(3)]
    array = np.arange(4, dtype=np.int64)
    held = device.upload(array)
    array[:] = 0
    assert held.numpy().tolist() == [0, 1, 2, 3]
    seen = device.memory()
    assert seen.peak >= seen.allocated == device.memory_allocated()
    device.synchronize()
    device.release_unused()
    del tensors, copied, held
    assert device.memory_allocated() == before


def test_a_copy_waits_for_what_computes_its_source_and_the_reader_for_the_copy(cuda: Cuda) -> None:
    device = CudaDevice(cuda)
    copies = [
        device.begin_copy([cuda.tensor(np.full((2, 3), 10 * step + layer)) for layer in range(3)]) for step in range(4)
    ]
    assert cuda.copies == 4, "one a step, whatever the number of layers"
    assert len(cuda.compute.queue) == 4 * (3 + 1), "nobody has waited yet"
    for step, copy in enumerate(copies):
        assert [one.tolist() for one in copy.result()] == [[[10 * step + layer] * 3] * 2 for layer in range(3)]
        assert len(cuda.compute.queue) == (3 - step) * 4, "a reader waits for its own copy alone"


def test_ids_are_narrowed_on_the_device(cuda: Cuda) -> None:
    wanted = np.asarray([[0, 511], [-1, 70_000]])
    (found,) = CudaDevice(cuda).begin_copy([cuda.tensor(wanted)], "int32").result()
    assert found.dtype == np.int32
    assert np.array_equal(found, wanted)


def test_an_id_out_of_range_shows_behind_the_narrowing(cuda: Cuda) -> None:
    capture = RouteCapture(ModelCard(16, 1, (0,)), 8, 8, CudaDevice(cuda))
    hook = capture.step(np.asarray([0]), np.asarray([1]), "v1")
    hook(0, cuda.tensor(np.asarray([[256 + 3]])))
    hook.finish()
    with pytest.raises(RouteMissing, match=r"outside 0\.\.15"):
        capture.flush()


def test_the_double_catches_a_copy_that_does_not_wait(cuda: Cuda) -> None:
    stream = cuda.device.Stream()
    source = cuda.tensor(np.zeros(2))
    with cuda.device.stream_guard(stream):
        target = source.pin_memory(blocking=False)
    with pytest.raises(Fault):
        stream.synchronize()
    with pytest.raises(Fault):
        target.numpy()
    with pytest.raises(Fault, match="holds up"):
        source.pin_memory()


def test_upload_leaves_the_array_alone(cuda: Cuda) -> None:
    array = np.arange(5)
    made = CudaDevice(cuda).upload(array)
    array[:] = 9
    assert made.numpy().tolist() == [0, 1, 2, 3, 4]


def test_idle_means_that_copies_are_done_too(cuda: Cuda) -> None:
    device = CudaDevice(cuda)
    device.begin_copy([cuda.tensor(np.zeros(2))])
    device.synchronize()
    assert [stream.queue for stream in cuda.streams] == [[], []]


def test_counters_and_the_cache_of_the_allocator(cuda: Cuda) -> None:
    device = CudaDevice(cuda)
    assert device.memory() == Memory(allocated=1000, reserved=4096, peak=2000)
    assert device.memory_allocated() == 1000
    device.release_unused()
    assert cuda.emptied == 1


def test_capture_over_the_cuda_side(cuda: Cuda) -> None:
    """Deferred steps: one copy each, read at the end, every row in its place."""
    device: Device = CudaDevice(cuda)
    card = ModelCard(300, 2, (1, 3, 4))
    capture = RouteCapture(card, 64, 8, device)
    for step in range(6):
        slots, generations = np.asarray([step, 32 + step]), np.asarray([5, 6])
        hook = capture.step(slots, generations, "v1")
        for layer in (1, 3, 4):
            hook(layer, cuda.tensor(np.asarray([[layer, 100 + step], [200 + step, layer]])))
        if step == 3:
            capture.suspended = True
        hook.finish()
        capture.suspended = False
    assert cuda.copies == 5
    routes, _ = capture.gather([0], [5], 3)
    assert routes[2].tolist() == [[1, 102], [3, 102], [4, 102]]
    assert capture.gather_recorded([0], [5], 4)[0] is None
    assert capture.gather([4], [6], 3)[0][1].tolist() == [[201, 1], [201, 3], [201, 4]]
