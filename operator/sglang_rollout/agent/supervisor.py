"""python3 -m sglang_rollout.agent.supervisor: the agent's container where the stage is in GPU memory. It starts an
agent that has ended again, in place: a restart of the container would end the process that holds the memory, too."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from types import FrameType

log = logging.getLogger("supervisor")

COMMAND = (sys.executable, "-m", "sglang_rollout.agent")
UNUSABLE = 2  # the agent's exit code for an environment that no restart mends
SHORT_SECONDS = 10.0
MOST_SHORT = 5  # short lives in a row, after which the kubelet's back-off is the better answer


class Supervisor:
    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._agent: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """The exit code of the last agent."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        short = 0
        while True:
            began = time.monotonic()
            code = self._one_life()
            short = short + 1 if time.monotonic() - began < SHORT_SECONDS else 0
            if self._stopping or code in (0, UNUSABLE) or short >= MOST_SHORT:
                return code if code >= 0 else 128 - code
            log.error("the agent ended with %s: it is started again", code)

    def _one_life(self) -> int:
        self._agent = subprocess.Popen(self._command)
        if self._stopping:
            self._agent.terminate()
        while True:
            # As the first process of a container it also gets the orphans.
            pid, status = os.waitpid(-1, 0)
            if pid == self._agent.pid:
                self._agent.returncode = os.waitstatus_to_exitcode(status)
                return self._agent.returncode

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._agent is not None and self._agent.returncode is None:
            os.kill(self._agent.pid, number)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stdout)
    return Supervisor().run()


if __name__ == "__main__":
    sys.exit(main())
