"""The command line: python -m e2e.cluster VERB."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from e2e.cluster import gobuild
from e2e.cluster.cluster import DEFAULT_NAME, Cluster, CurrentCluster, open_cluster
from e2e.cluster.errors import ClusterError
from e2e.cluster.kind import NODES, Mount
from e2e.cluster.nodes import FAULTS
from e2e.cluster.verify import verify

_TOOL_SETS = {
    "apiserver": gobuild.API_SERVER,
    "commands": (*gobuild.COMMANDS, gobuild.PROGRAMS["kubectl"]),
    "all": tuple(gobuild.PROGRAMS.values()),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    try:
        return int(args.run(args))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, function: object, text: str, *, named: bool = True) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(run=function)
        if named:
            added.add_argument("--name", default=DEFAULT_NAME, help=f"of the cluster; default {DEFAULT_NAME}")
        return added

    tools = verb("tools", _tools, "build the programs of the cluster, once for each version", named=False)
    tools.add_argument("--only", choices=sorted(_TOOL_SETS), default="all", help="a part of them")
    up = verb("up", _up, "start the cluster, or keep a healthy one")
    up.add_argument(
        "--mount", action="append", type=str, metavar="HOST:NODE",
        help="a path that all nodes see, read-only; may be repeated",
    )  # fmt: skip
    down = verb("down", _down, "remove the cluster and all that it left on this machine")
    down.add_argument("--purge", action="store_true", help="remove what was built for it as well")
    verb("status", _status, "show nodes and their state")
    verb("kubeconfig", _kubeconfig, "print the path of the kubeconfig")
    verb("env", _env, 'print shell exports: eval "$(python -m e2e.cluster env)"')
    load = verb("load", _load, "put images into all nodes")
    load.add_argument("images", nargs="+", metavar="IMAGE_OR_TAR")
    docker = verb("docker", _docker, "run docker against the daemon of the nodes")
    docker.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    node = verb("node", _node, "hurt a node, or make it well")
    node.add_argument("fault", choices=FAULTS)
    node.add_argument("node", help=f"one of {', '.join(NODES)}")
    verb("verify", _verify, "check that the cluster does what a Kubernetes must do; about two minutes")
    return parser


def _tools(args: argparse.Namespace) -> int:
    layout = Cluster().layout
    chosen = _TOOL_SETS[args.only]
    gobuild.build(layout, chosen)
    for program in chosen:
        print(gobuild.binary(layout, program.name))
    return 0


def _up(args: argparse.Namespace) -> int:
    mounts = None if args.mount is None else [Mount.parse(text) for text in args.mount]
    cluster = open_cluster(args.name, mounts)
    cluster.up()
    print(cluster.kubeconfig)
    return 0


def _down(args: argparse.Namespace) -> int:
    open_cluster(args.name).down(purge=args.purge)
    return 0


def _status(args: argparse.Namespace) -> int:
    cluster = open_cluster(args.name)
    if not isinstance(cluster, CurrentCluster):
        for node, state in cluster.nodes.states().items():
            print(f"{node:40} {state}")
    healthy = cluster.healthy()
    print("healthy" if healthy else "not healthy")
    return 0 if healthy else 1


def _kubeconfig(args: argparse.Namespace) -> int:
    print(open_cluster(args.name).kubeconfig)
    return 0


def _env(args: argparse.Namespace) -> int:
    for name, value in open_cluster(args.name).environment().items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _load(args: argparse.Namespace) -> int:
    open_cluster(args.name).load(*args.images)
    return 0


def _docker(args: argparse.Namespace) -> int:
    cluster = open_cluster(args.name)
    cluster.engine.start()
    client = str(cluster.engine.client)
    os.execve(client, [client, *args.arguments], {**os.environ, **cluster.engine.env})


def _node(args: argparse.Namespace) -> int:
    open_cluster(args.name).nodes.inflict(args.fault, args.node)
    return 0


def _verify(args: argparse.Namespace) -> int:
    return 0 if verify(open_cluster(args.name)) else 1
