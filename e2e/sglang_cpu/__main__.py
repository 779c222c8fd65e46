"""Command line: install the CPU engine, make its models, run one here."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.sglang_cpu import environment, models
from e2e.sglang_cpu.engine import engine_command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.sglang_cpu", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("install", help="download and install SGLang for CPU (5.6 GB) into the cache; prints its folder")
    verbs.add_parser("path", help="print where the environment is or will be")
    verbs.add_parser("models", help="make the tiny models in the cache; prints their folders")
    serve = verbs.add_parser("serve", help="run one engine in the foreground")
    serve.add_argument("--model", required=True, help="a name that `models` prints, or a path")
    serve.add_argument("--port", type=int, required=True)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    serve.add_argument("--nodes", type=int, default=1)
    serve.add_argument("--node-rank", type=int, default=0)
    serve.add_argument("--rendezvous", metavar="ADDRESS:PORT", help="of rank 0, for several nodes")
    serve.add_argument("--api-key")
    serve.add_argument("--admin-api-key")
    serve.add_argument("--weight-version")
    serve.add_argument("extra", nargs="*", help="further words for SGLang, after --")
    return parser


def _serve(options: argparse.Namespace) -> None:
    model = models.path(options.model) if options.model in models.MODELS else Path(options.model)
    argv, env = engine_command(
        model,
        options.port,
        host=options.host,
        tp=options.tp,
        nodes=options.nodes,
        node_rank=options.node_rank,
        rendezvous=options.rendezvous,
        api_key=options.api_key,
        admin_api_key=options.admin_api_key,
        weight_version=options.weight_version,
        extra=options.extra,
    )
    os.execve(argv[0], argv, {**os.environ, **env})


def main() -> int:
    options = _parser().parse_args()
    try:
        match options.verb:
            case "install":
                print(environment.install())
            case "path":
                print(environment.folder())
            case "models":
                for name, path in models.make_all().items():
                    print(f"{name}={path}")
            case "serve":
                _serve(options)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
