"""python -m bench.weights wire | peer | commits: staging over Gloo beside a bare broadcast, a catch-up from another
agent beside a bare socket, and the stall of a commit beside SGLang's own updates; prints a table, or JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from . import commits, peer, wire

MIB = 1 << 20
DIMENSIONS = {"tiny": (128, 2), "1g": (2048, 13)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.weights", description=__doc__)
    parser.add_argument("what", choices=("wire", "peer", "commits"))
    parser.add_argument("--mib", type=int, nargs="+", default=[128, 1024], help="wire, peer: of models, from 88")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2], help="wire: agents")
    parser.add_argument("--bucket-mib", type=int, default=64, help="wire, peer: of a bucket")
    parser.add_argument("--models", choices=DIMENSIONS, nargs="+", default=list(DIMENSIONS), help="commits")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for words, found in {"wire": _wire, "peer": _peer, "commits": _commits}[given.what](given):
        figures.append(found)
        if not given.json:
            print(words, flush=True)
    load = os.getloadavg()[0]
    if given.json:
        print(json.dumps({"load": load, "figures": figures}, indent=1))
    elif load > (os.cpu_count() or 1) + 2:
        print(f"the machine is busy with other work (load {load:.0f}): only ratios mean something")
    return 0


def _wire(given: argparse.Namespace) -> Any:
    for size in given.mib:
        for receivers in given.receivers:
            found = asyncio.run(wire.measure(size * MIB, receivers, given.bucket_mib * MIB, given.repeats))
            yield (
                f"{found.size / MIB:7.0f} MiB to {receivers}: ours {found.ours:.3f} s, bare {found.bare:.3f} s, "
                f"{found.share:.0%} of it ({found.gigabytes_a_second:.2f} GB/s)",
                found.to_object(),
            )


def _peer(given: argparse.Namespace) -> Any:
    for size in given.mib:
        found = asyncio.run(peer.measure(size * MIB, given.bucket_mib * MIB, given.repeats))
        yield (
            f"{found.size / MIB:7.0f} MiB from a peer: ours {found.ours:.3f} s, bare {found.bare:.3f} s, "
            f"{found.share:.0%} of it ({found.gigabytes_a_second:.2f} GB/s); {found.ours_spent:.2f} s of a processor "
            f"for a GB, bare {found.bare_spent:.2f} s",
            found.to_object(),
        )


def _commits(given: argparse.Namespace) -> Any:
    for name in given.models:
        found = asyncio.run(commits.measure(*DIMENSIONS[name], given.repeats))
        spent = ", ".join(f"{name} {seconds:.4f}" for name, seconds in found.parts.items())
        yield (
            f"{found.size / MIB:7.0f} MiB: staged {found.staged:.3f} s ({spent}); by SGLang's own routes "
            f"from_distributed {found.distributed:.3f} s, from_disk {found.disk:.3f} s and {found.disk_cached:.3f} s "
            f"when the files are in memory (reading them takes {found.read:.3f} s); staged is "
            f"{found.staged / found.distributed:.0%}, {found.staged / found.disk:.0%} and "
            f"{found.staged / found.disk_cached:.0%} of them",
            found.to_object(),
        )


if __name__ == "__main__":
    sys.exit(main())
