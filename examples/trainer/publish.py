"""Publishes a checkpoint's tensors to a fleet, as a trainer does with those that it has in memory.

python publish.py FLEET VERSION FOLDER
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from sglang_rollout.client import FleetError, RolloutFleet

PORT = 29600  # that the pod opens, and agents connect to


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """By the checkpoint's names, whole, one after the other: a sharded trainer gathers each here."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


def main(fleet_name: str, version: str, folder: str) -> int:
    with RolloutFleet.connect(fleet_name, port=PORT) as fleet:
        try:
            result = fleet.publish(version, tensors(Path(folder)))
        except FleetError as error:  # the fleet serves on as it did; the label may be tried again
            print(error, file=sys.stderr)
            return 1
    print(f"version {result.version} serves; engines stood still for {result.stall_seconds:.3f} s at most")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
