"""PID 1 of the engine container: waits for the agent's order, makes the keys of this start, runs SGLang, and leaves
neither a process nor an unexplained end behind."""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import secrets
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

# Run by path, in an image that knows nothing of our packages.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from sglang_rollout.engine import process_tree  # noqa: E402
from sglang_rollout.engine.failure import failure_sentence, last_words  # noqa: E402
from sglang_rollout.engine.launch_settings import CONFIG_FILE, LaunchSettings, key_config  # noqa: E402
from sglang_rollout.engine.local_http import Answer, LocalServer, call  # noqa: E402
from sglang_rollout.engine.log_pump import LogPump  # noqa: E402
from sglang_rollout.protocol import pod  # noqa: E402
from sglang_rollout.serving.private_file import write_private  # noqa: E402

log = logging.getLogger("launcher")

SAY_WHAT_IS_WAITED_FOR_SECONDS = 10.0
ASK_AGAIN_SECONDS = 0.5
AGENT_ANSWERS_WITHIN_SECONDS = 60.0  # it holds the answer for less
TERMINATE_SECONDS = 5.0  # from SIGTERM to SIGKILL: requests were drained before, by the preStop hook
LAST_LINES = 20  # in the record; the pod's log has the rest


class Launcher:
    """One engine start, from the wait for the agent's order to the end of SGLang."""

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._start_id = secrets.token_hex(8)
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._kill_reason = ""
        self._ordered = False
        self._stopping = False
        self._started = False
        self._pump: LogPump | None = None
        self._record: dict[str, Any] = {}

    def run(self) -> int:
        """The exit code of the container: 0 only when it was asked to end."""
        process_tree.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_terminate)
        signal.signal(signal.SIGCHLD, lambda number, frame: self._events.put("child"))
        order = self._wait_for_order()
        memory_kills = process_tree.out_of_memory_kills()
        # Before the record tells of this start: an agent that finds no launcher behind a record takes it for dead.
        server = LocalServer(
            self._settings.run_dir / pod.LAUNCHER_SOCKET,
            {
                ("GET", pod.PATH_START): lambda message: (200, {"startId": self._start_id}),
                ("POST", pod.PATH_KILL): self._on_kill,
            },
        )
        try:
            exit_code = self._watch(self._start(order))
        finally:
            server.close()
        return self._finish(exit_code, process_tree.out_of_memory_kills() > memory_kills)

    # --- before SGLang ---

    def _wait_for_order(self) -> dict[str, Any]:
        asked = time.monotonic()
        said = asked - SAY_WHAT_IS_WAITED_FOR_SECONDS
        while True:
            reason, order = self._ask()
            if order is not None:
                log.info("start %s: version %r from %s", self._start_id, order["weightVersion"], order["modelPath"])
                if self._settings.on_cpu and any((order.get("launch") or {}).values()):
                    log.info("--enable-memory-saver and its like are left out: there is no memory saver on CPU")
                return order
            now = time.monotonic()
            if now - said >= SAY_WHAT_IS_WAITED_FOR_SECONDS:
                log.info("waiting to start for %.0f s: %s", now - asked, reason)
                said = now
            time.sleep(ASK_AGAIN_SECONDS)

    def _ask(self) -> tuple[str, dict[str, Any] | None]:
        """Why not yet, or a protocol.launch.LaunchOrder."""
        socket = self._settings.run_dir / pod.AGENT_SOCKET
        try:
            status, answer = call(
                socket, "POST", pod.PATH_LAUNCH, {"startId": self._start_id}, AGENT_ANSWERS_WITHIN_SECONDS
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"the agent does not answer on {socket}: {error}", None
        if status == 200:
            return "", answer
        return str(answer.get("error", f"the agent answered {status}")), None

    def _start(self, order: dict[str, Any]) -> int:
        data_key, admin_key = secrets.token_hex(32), secrets.token_hex(32)
        write_private(self._settings.run_dir / CONFIG_FILE, key_config(data_key, admin_key))
        self._record = {
            "startId": self._start_id,
            "startedAt": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "order": order,
            "dataKey": data_key,
            "adminKey": admin_key,
            "hook": self._settings.hook,
        }
        if self._settings.hook:
            self._settings.place_hook()
        self._write_record()
        self._started = True
        pid, output = process_tree.spawn(self._settings.command(order), self._settings.environment(os.environ))
        self._pump = LogPump(output, sys.stdout.buffer, [data_key, admin_key], self._on_silent_load_failure)
        self._pump.start()
        self._write_record(pid=pid)
        return pid

    # --- while SGLang runs ---

    def _watch(self, pid: int) -> int:
        """Until the engine's main process has ended: its exit code."""
        started = time.monotonic()
        terminate_by: float | None = None
        ready = False
        exit_code: int | None = None
        while exit_code is None:
            try:
                event = self._events.get(timeout=1.0)
            except queue.Empty:
                event = ""
            if event == "terminate" and terminate_by is None:
                terminate_by = time.monotonic() + TERMINATE_SECONDS
                os.kill(pid, signal.SIGTERM)
            if not ready:
                ready = self._answers()
                if not ready and time.monotonic() - started > self._settings.startup_timeout:
                    self._kill_reason = (
                        f"it was not ready {self._settings.startup_timeout:.0f} s after its start "
                        "(engine.startupTimeoutSeconds)"
                    )
            ended = process_tree.reap()
            if self._kill_reason or (terminate_by is not None and time.monotonic() > terminate_by):
                ended |= process_tree.kill_all(pid)
            exit_code = ended.get(pid)
        process_tree.kill_all(pid)
        return exit_code

    def _answers(self) -> bool:
        host = "::1" if ":" in self._settings.pod_ip else "127.0.0.1"
        connection = http.client.HTTPConnection(host, self._settings.engine_port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        if not self._started:
            raise SystemExit(0)
        self._events.put("terminate")

    def _on_kill(self, message: dict[str, Any]) -> Answer:
        """A protocol.launch.KillOrder."""
        if message.get("startId") != self._start_id:
            return 409, {"error": f"this is start {self._start_id}, not {message.get('startId')!r}"}
        log.warning("killing the engine: %s", message.get("reason"))
        self._kill_reason = str(message.get("reason") or "no reason given")
        self._ordered = bool(message.get("ordered"))
        self._events.put("kill")
        return 200, {}

    def _on_silent_load_failure(self, line: str) -> None:
        self._kill_reason = f"one of its ranks could not load the new weights: {line}"
        self._events.put("kill")

    # --- after SGLang ---

    def _finish(self, exit_code: int, out_of_memory: bool) -> int:
        assert self._pump is not None
        self._pump.join(timeout=5.0)
        lines = self._pump.lines()
        if self._ordered or (self._stopping and not self._kill_reason):
            failure = ""
        elif self._kill_reason:
            words = last_words(lines)
            failure = f"SGLang was killed: {self._kill_reason}" + (f"; its last words: {words}" if words else "")
        else:
            failure = failure_sentence(lines, exit_code, out_of_memory)
        self._write_record(exited=True, exitCode=exit_code, failure=failure, lastLines=lines[-LAST_LINES:])
        if not failure:
            return 0
        log.error("%s", failure)
        try:
            self._settings.termination_log.write_text(failure)
        except OSError as error:
            log.warning("cannot write %s: %s", self._settings.termination_log, error)
        return exit_code if 0 < exit_code < 256 else 1

    def _write_record(self, **changes: object) -> None:
        """The protocol.launch.EngineRecord of this start."""
        self._record |= changes
        write_private(self._settings.run_dir / pod.ENGINE_RECORD, json.dumps(self._record).encode())


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s launcher %(message)s", stream=sys.stdout)
    try:
        settings = LaunchSettings.read(os.environ, sys.argv[1:])
    except ValueError as error:
        log.error("%s", error)
        return 2
    return Launcher(settings).run()


if __name__ == "__main__":
    sys.exit(main())
