"""The colocated loop of a fleet: engines sleep while the trainer has the device, then take its weights and go on.

python examples/colocated_loop.py /ckpt/meeting --steps 2       (workers: moebus worker ... --label role=rollout
                                                                  --weight-root /ckpt)
"""

import argparse
from pathlib import Path

from moebus.engine.simulated.rendezvous import Rendezvous
from moebus.producers import ControlClient

FLEET = "role=rollout"
TENSORS = ["embed", "layers.0.experts", "head"]


def train(version: str) -> dict[str, bytes]:
    """Yours: it has the whole device."""
    return {name: f"{name} of {version}".encode() for name in TENSORS}


def step(control: ControlClient, version: str, folder: Path) -> None:
    """Any command that does not succeed on every worker raises FleetError, with the names: nobody resumes half-way."""
    control.sleep(mode="wait", target=FLEET)  # pauses first, and lets running requests finish
    weights = train(version)
    control.wakeup("weight", weights="empty", target=FLEET)  # memory, but nothing in it yet
    folder.mkdir()
    info = {"rendezvous": str(folder), "tensors": TENSORS}  # for NCCL: address, world size, names, shapes
    control.transfer_weights("init", info=info, target=FLEET)
    control.transfer_weights("start", info=info, target=FLEET)
    receiving = control.submit("transfer_weights", {"step": "update", "info": info}, target=FLEET, deadline_s=60)
    for name, value in weights.items():  # while every worker is inside its `update`: for NCCL, the broadcasts
        Rendezvous(folder).send(name, value)
    received = receiving.wait(60)
    assert received.ok, received.sentence()
    control.transfer_weights("finish", version, target=FLEET)
    control.wakeup("kv_cache", target=FLEET)
    outcome = control.resume(target=FLEET)
    states = {name: one.state for name, one in sorted(outcome.responses.items())}
    print(version, {name: f"{state.lifecycle} {state.version}" for name, state in states.items() if state})


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="where trainer and simulated engines meet, below a --weight-root")
    options.add_argument("--steps", type=int, default=2)
    given = options.parse_args()
    with ControlClient.from_settings() as client:
        for number in range(1, given.steps + 1):
            step(client, f"step-{number}", given.folder / f"{number}")
