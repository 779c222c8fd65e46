"""The console script kubectl-sgrollout, which kubectl finds as `kubectl sgrollout`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from .verbs import sgrollout
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: install the plug-in with its packages: pip install 'sglang-rollout[cli]'")
    sgrollout(prog_name="kubectl sgrollout")


if __name__ == "__main__":
    main()
