"""Command line: print the images' references, build them, load them into the cluster's nodes."""

from __future__ import annotations

import argparse
import sys

from e2e.cluster.errors import ClusterError
from e2e.images.build import build_all
from e2e.images.catalogue import IMAGES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.images", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("refs", help="print name=reference; builds nothing")
    build = verbs.add_parser("build", help="build what is missing; prints name=reference")
    build.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(IMAGES)}; all unless given")
    build.add_argument("--load", action="store_true", help="load them into the nodes of the running cluster, too")
    options = parser.parse_args()
    try:
        if options.verb == "refs":
            refs = {name: image.snapshot().ref for name, image in IMAGES.items()}
        else:
            unknown = sorted(set(options.names) - set(IMAGES))
            if unknown:
                parser.error(f"no image {', '.join(unknown)}: there are {', '.join(IMAGES)}")
            refs = build_all(options.names or IMAGES)
            if options.load:
                _load(list(refs.values()))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, ref in refs.items():
        print(f"{name}={ref}")
    return 0


def _load(refs: list[str]) -> None:
    from e2e.cluster import open_cluster  # the cluster's tools are needed only here

    open_cluster().load(*refs)


if __name__ == "__main__":
    sys.exit(main())
