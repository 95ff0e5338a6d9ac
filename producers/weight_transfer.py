"""WeightTransferClient: the trainer's side of a weight transfer, with commands that go over the bus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moebus.producers.transfer_step import Abort, TransferStep
from moebus.schemas.control_args import CacheMode
from moebus.schemas.control_args import TransferStep as StepName
from moebus.schemas.errors import InvalidInput

if TYPE_CHECKING:
    from moebus.producers.control import ControlClient, Outcome
    from moebus.producers.control.commands import TargetLike

TIMEOUT_SECONDS = 600.0
GRACE_SECONDS = 30.0
Info = Mapping[str, Any]


class WeightTransferClient:
    """The four steps of vLLM's weight transfer (and of any engine whose `transfer_weights` has them).

    `init` and `update` are collectives: engines and trainer wait for each other inside, so the trainer joins while the
    command runs and collects the answers afterwards. `start` and `finish` are plain commands.

    The methods with vLLM's names are what its trainer-side engines ask of a client (`VLLMWeightSyncClient`, docs of
    vLLM 0.32, "Weight Transfer"): hand an object of this class to them in place of the HTTP one. They block; vLLM calls
    `init_weight_transfer_engine` and `update_weights` from threads of its own. Thread-safe.
    """

    def __init__(
        self,
        control: ControlClient,
        *,
        target: TargetLike = None,
        version: str | None = None,
        cache: CacheMode = "reset",
        timeout: float = TIMEOUT_SECONDS,
        grace: float = GRACE_SECONDS,
        abort: Abort | None = None,
    ) -> None:
        """`version`: what `finish` names the weights where it is not told; set it before each round. `timeout`: seconds
        of each step. `abort`, `grace`: see TransferStep."""
        self.version = version
        self.abort = abort
        self._control = control
        self._target = target
        self._cache: CacheMode = cache
        self._timeout = timeout
        self._grace = grace

    def init(self, info: Info | None = None, *, per_worker: Mapping[str, Info] | None = None) -> TransferStep:
        """Engines and trainer find each other. `per_worker`: an info for each worker id, as NCCL needs where servers
        have ranks of their own (`rank_offset`). Raises InvalidInput: not exactly one of the two."""
        return self._collective("init", info, per_worker)

    def start(self) -> Outcome:
        """Opens the update: from now on the engines hold no version. Raises FleetError."""
        return self._plain("start", self.version)

    def update(self, info: Info | None = None, *, per_worker: Mapping[str, Info] | None = None) -> TransferStep:
        """Sends tensors, as often as needed between `start` and `finish`. Raises as `init`."""
        return self._collective("update", info, per_worker)

    def finish(self, version: str | None = None) -> Outcome:
        """Ends the update: the engines hold `version`. Raises FleetError; InvalidInput: no version was named."""
        return self._plain("finish", version if version is not None else self.version)

    # -- vLLM's names

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        with self.init(init_info):
            pass

    def start_weight_update(self) -> None:
        self.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        with self.update(update_info):
            pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.finish(weight_version)

    def _plain(self, step: StepName, version: str | None) -> Outcome:
        return self._control.transfer_weights(
            step, version, cache=self._cache, target=self._target, timeout=self._timeout
        )

    def _collective(self, step: StepName, info: Info | None, per_worker: Mapping[str, Info] | None) -> TransferStep:
        if (info is None) == (not per_worker):
            raise InvalidInput("info", "exactly one of info and per_worker is needed")
        pairs: list[tuple[TargetLike, Info]] = (
            [(self._target, info)] if info is not None else [([name], one) for name, one in (per_worker or {}).items()]
        )
        calls = [(target, self._args(step, one)) for target, one in pairs]
        return TransferStep(self._control, calls, timeout=self._timeout, grace=self._grace, abort=self._aborted)

    def _args(self, step: StepName, info: Info) -> dict[str, Any]:
        args = {"step": step, "version": self.version, "info": dict(info), "cache": self._cache}
        return {name: value for name, value in args.items() if value is not None}

    def _aborted(self, reason: str) -> None:
        if self.abort is not None:
            self.abort(reason)
