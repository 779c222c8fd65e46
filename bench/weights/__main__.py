"""python -m bench.weights: prints figures of staging over Gloo as a table, or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from .wire import WireFigure, measure

MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.weights", description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[128, 1024], help="sizes of the model")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures: list[WireFigure] = []
    for size in given.mib:
        for receivers in given.receivers:
            found = asyncio.run(measure(size * MIB, receivers, given.bucket_mib * MIB, given.repeats))
            figures.append(found)
            if not given.json:
                print(
                    f"{found.size / MIB:7.0f} MiB to {receivers}: ours {found.ours:.3f} s, bare {found.bare:.3f} s, "
                    f"{found.share:.0%} of it ({found.gigabytes_a_second:.2f} GB/s)",
                    flush=True,
                )
    if given.json:
        print(json.dumps({"load": os.getloadavg(), "figures": [one.to_object() for one in figures]}, indent=1))
    elif os.getloadavg()[0] > (os.cpu_count() or 1):
        print(f"the machine is busy with other work (load {os.getloadavg()[0]:.0f}): only ratios mean something")
    return 0


if __name__ == "__main__":
    sys.exit(main())
