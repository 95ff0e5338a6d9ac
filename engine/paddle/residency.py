"""The weights on the device, and everything they can come back from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.files import load_weights
from moebus.engine.paddle.runtime import load_paddle
from moebus.engine.paddle.weights import Arrays, random_weights, weight_shapes, weights_digest
from moebus.engine.port import Deadline, EngineFailed, EngineRefused, EngineTainted, Level, WakeWeights
from moebus.engine.waiting import Never, check_deadline


@dataclass(frozen=True, slots=True)
class Committed:
    """The weights that count. `source` None: the engine's own (the seed, or the file it started from)."""

    version: str
    source: str | None
    digest: str


class WeightMemory:
    """Parameter objects live as long as the engine; sleeping frees their storage, waking and updating fill it in place.

    Not thread-safe: the engine's device lock is held around every call but `load` and the properties.
    """

    def __init__(
        self, config: ModelConfig, seed: int, version: str, source: str | None, allowed_roots: Sequence[str]
    ) -> None:
        self._paddle = load_paddle()
        self._config = config
        self._seed = seed
        self._own_source = source
        self._roots = tuple(allowed_roots)
        self._shapes = weight_shapes(config)
        arrays = self.load(None, Never())
        self.committed = Committed(version, None, weights_digest(arrays))
        self.parameters: dict[str, Any] = {name: self._parameter(array) for name, array in arrays.items()}
        self.resident = True
        self.valid = True
        self.tainted = False
        self._host_copy: Arrays | None = None

    @property
    def version(self) -> str | None:
        """None where the device holds nothing, or a mixture."""
        return self.committed.version if self.resident and self.valid and not self.tainted else None

    @property
    def digest(self) -> str | None:
        return None if self.version is None else self.committed.digest

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that have storage now."""
        return sum(int(p.size) * p.element_size() for p in self.parameters.values() if p._is_initialized())

    def load(self, source: str | None, deadline: Deadline) -> Arrays:
        """Checked weights in host memory from `source`, or the engine's own.

        Raises:
            EngineRefused, EngineTimeout: as `load_weights`.
        """
        chosen = source if source is not None else self._own_source
        if chosen is None:
            return random_weights(self._config, self._seed)
        return load_weights(chosen, self._roots, self._shapes, deadline)

    def sleep(self, level: Level, deadline: Deadline) -> int:
        """Frees the storage; `offload` keeps a host copy first. Bytes freed, 0 when already asleep."""
        if not self.resident:
            return 0
        copy = self._copied(deadline) if level == "offload" and self.version is not None else None
        freed = self.nbytes
        self._clear()
        self._host_copy = copy
        return freed

    def _copied(self, deadline: Deadline) -> Arrays:
        copy: Arrays = {}
        for name, parameter in self.parameters.items():
            check_deadline(deadline, "copying the weights to the host")
            copy[name] = np.array(parameter.numpy())  # what numpy() returns is memory of Paddle's own, and counts
        return copy

    def wake(self, weights: WakeWeights, deadline: Deadline) -> int:
        """Bytes allocated, 0 when already resident. `restore` fills resident but empty weights too.

        Raises:
            EngineFailed: nothing to restore from.  EngineTimeout. Sleeping weights still sleep then.
        """
        before = self.nbytes
        if weights == "empty":
            if not self.resident:
                self._fill({name: np.zeros(shape, np.float32) for name, shape in self._shapes.items()}, deadline)
                self.resident, self.valid, self._host_copy = True, False, None
        elif not (self.resident and self.valid):
            self._fill(self._host_copy or self._from_source(deadline), deadline)
            self.resident, self.valid, self._host_copy = True, True, None
        return self.nbytes - before

    def _from_source(self, deadline: Deadline) -> Arrays:
        try:
            arrays = self.load(self.committed.source, deadline)
        except EngineRefused as error:
            raise EngineFailed(f"wakeup: the weights cannot be restored; {error}") from error
        if weights_digest(arrays) != self.committed.digest:
            raise EngineFailed(
                f"wakeup: the weights at {self.committed.source or self._own_source!r} are no longer those of version"
                f" {self.committed.version!r}; update to them, or wake empty"
            )
        return arrays

    def _fill(self, arrays: Arrays, deadline: Deadline) -> None:
        """Fills memory that does not count yet; whatever stops it leaves that memory as it was: asleep or empty."""
        try:
            for name, array in arrays.items():
                check_deadline(deadline, "filling the weights")
                self.parameters[name].set_value(array)
        except BaseException:
            if not self.resident:
                self._clear()
            raise

    def commit(self, new: Committed, arrays: Arrays, step: Callable[[str], None]) -> None:
        """Writes `arrays` over the current weights in place; `step(name)` is called before each write.

        Raises:
            EngineFailed: nothing written yet.  EngineTainted: some were.
        """
        written = 0
        try:
            for name, array in arrays.items():
                step(name)
                self.parameters[name].set_value(array)
                written += 1
        except BaseException as error:
            if not written:
                raise EngineFailed(f"commit: version {new.version!r} was not written ({error})") from error
            self.tainted = True
            raise EngineTainted(
                f"commit: cut off after {written} of {len(arrays)} tensors of version {new.version!r} ({error});"
                " the weights are a mixture until an update succeeds"
            ) from error
        self.committed = new
        self.valid, self.tainted, self._host_copy = True, False, None

    def _parameter(self, array: npt.NDArray[np.float32]) -> Any:
        zero = self._paddle.nn.initializer.Constant(0.0)
        parameter = self._paddle.create_parameter(list(array.shape), "float32", default_initializer=zero)
        parameter.set_value(array)
        return parameter

    def _clear(self) -> None:
        for parameter in self.parameters.values():
            parameter._clear_data()
        self.resident = False

    def host_arrays(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """A host copy of the current weights, by name."""
        return self._copied(Never())
