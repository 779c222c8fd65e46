"""python3 -m sglang_rollout.agent.drain: the engine container's preStop hook. Returns when the agent says that no
request runs any more, or when the time for that is over."""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path

from sglang_rollout.engine.local_http import call
from sglang_rollout.protocol import pod

MARGIN_SECONDS = 10.0


def main() -> int:
    socket = Path(os.environ.get(pod.ENV_RUN_DIR, pod.RUN_DIR), pod.AGENT_SOCKET)
    seconds = float(os.environ.get(pod.ENV_DRAIN_SECONDS, "45")) + MARGIN_SECONDS
    try:
        status, answer = call(socket, "POST", pod.PATH_DRAIN, {}, seconds)
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"drain: the agent does not answer on {socket}: {error}", file=sys.stderr)
        return 1
    if status != 200:
        print(f"drain: {answer.get('error', status)}", file=sys.stderr)
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
