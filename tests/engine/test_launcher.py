"""The launcher as a process, with a small program in SGLang's place and our side of the agent's socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.engine.local_http import LocalServer, call
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.launch import EngineRecord, LaunchOrder
from sglang_rollout.protocol.wire import loads, to_wire
from tests.free_ports import free_port

ROOT = Path(__file__).parents[2] / "operator"
RUN = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from sglang_rollout.engine import launch_settings, launcher, process_tree
launch_settings.SERVE = Path({program!r})
launcher.SAY_WHAT_IS_WAITED_FOR_SECONDS = launcher.ASK_AGAIN_SECONDS = 0.1
launcher.TERMINATE_SECONDS = 1.0
process_tree.out_of_memory_kills = lambda: 0
sys.exit(launcher.main())
"""
SERVER = """
import http.server, os, subprocess, sys, time
print("keys", open(sys.argv[sys.argv.index("--config") + 1]).read(), flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
port = int([a for a in sys.argv if a.startswith("--port=")][0].split("=")[1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Pod:
    """Temporary folders, an agent's socket, and a launcher that runs `program` as SGLang."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.agent: LocalServer | None = None
        self.process: subprocess.Popen[str] | None = None

    def serve_agent(self) -> None:
        def launch(message: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            self.asked.append(message["startId"])
            return self.answers.pop(0) if self.answers else (200, to_wire(LaunchOrder("/m", "1")))

        self.agent = LocalServer(self.folder / pod.AGENT_SOCKET, {("POST", pod.PATH_LAUNCH): launch})

    def start(self, program: str, **environment: str) -> subprocess.Popen[str]:
        (self.folder / "program.py").write_text(program)
        script = RUN.format(root=str(ROOT), program=str(self.folder / "program.py"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, "--", "--tp-size=1"],
            env={
                **os.environ,
                pod.ENV_RUN_DIR: str(self.folder),
                pod.ENV_TERMINATION_LOG: str(self.folder / "termination"),
                pod.ENV_ENGINE_PORT: str(free_port()),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.process

    def wait(self) -> tuple[int, str]:
        assert self.process is not None
        output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, output

    def line_with(self, word: str) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if word in line:
                return line
        raise AssertionError(f"the launcher ended without a line with {word!r}")

    @property
    def record(self) -> EngineRecord:
        return loads(EngineRecord, (self.folder / pod.ENGINE_RECORD).read_bytes())

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.terminate()  # not SIGKILL: only it knows what else it has to end
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            if self.process.stdout:
                self.process.stdout.close()
        if self.agent is not None:
            self.agent.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path)
    yield made
    made.close()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_the_end_of_sglang_is_explained(place: Pod) -> None:
    place.serve_agent()
    place.start("import sys\nprint('hello')\nraise ValueError('no such backend')")
    code, output = place.wait()
    assert code == 1
    assert "hello" in output
    record = place.record
    assert record.exited
    assert record.exit_code == 1
    assert record.failure == "SGLang ended with exit code 1: ValueError: no such backend"
    assert record.last_lines[-1] == "ValueError: no such backend"
    assert record.order == LaunchOrder("/m", "1")
    assert (place.folder / "termination").read_text() == record.failure


def test_an_end_with_code_0_is_a_failure_too(place: Pod) -> None:
    place.serve_agent()
    place.start("print('done')")
    assert place.wait()[0] == 1
    assert place.record.failure == "SGLang ended with exit code 0: done"


def test_it_says_what_it_waits_for_and_then_starts(place: Pod) -> None:
    place.start("print('ran')")
    assert "the agent does not answer" in place.line_with("waiting to start")
    place.answers = [(425, {"error": "the operator has not assigned this pod"})] * 3
    place.serve_agent()
    assert "the operator has not assigned this pod" in place.line_with("has not assigned")
    code, output = place.wait()
    assert "ran" in output
    assert code == 1
    assert len(set(place.asked)) == 1


def test_keys_are_new_private_and_not_in_the_log(place: Pod) -> None:
    place.serve_agent()
    place.start(SERVER)
    logged = place.line_with("keys")
    record = place.record
    assert len({record.data_key, record.admin_key}) == 2
    assert all(len(key) == 64 for key in (record.data_key, record.admin_key))
    assert record.data_key not in logged
    assert record.admin_key not in logged
    assert "***" in logged
    for name in (pod.ENGINE_RECORD, "engine-config.yaml", pod.LAUNCHER_SOCKET):
        assert (place.folder / name).stat().st_mode & 0o077 == 0
    command = Path(f"/proc/{record.pid}/cmdline").read_bytes().decode()
    assert record.data_key not in command
    assert record.admin_key not in command


def test_a_kill_of_this_start_leaves_nothing(place: Pod) -> None:
    place.serve_agent()
    place.start(SERVER)
    child = int(place.line_with("child").split()[1])
    started = place.record
    launcher = place.folder / pod.LAUNCHER_SOCKET
    assert call(launcher, "GET", pod.PATH_START, {}, 5) == (200, {"startId": started.start_id})
    assert call(launcher, "POST", pod.PATH_KILL, {"startId": "another", "reason": "x"}, 5)[0] == 409
    assert place.process is not None
    assert place.process.poll() is None
    assert call(launcher, "POST", pod.PATH_KILL, {"startId": started.start_id, "reason": "wedged"}, 5)[0] == 200
    code, _ = place.wait()
    assert code == 1
    assert place.record.failure.startswith("SGLang was killed: wedged")
    assert gone(started.pid)
    assert gone(child)


def test_an_end_that_was_ordered_is_no_failure(place: Pod) -> None:
    place.serve_agent()
    place.start(SERVER)
    place.line_with("child")
    started = place.record
    order = {"startId": started.start_id, "reason": "the operator ordered a restart", "ordered": True}
    assert call(place.folder / pod.LAUNCHER_SOCKET, "POST", pod.PATH_KILL, order, 5)[0] == 200
    code, _ = place.wait()
    assert code == 0
    assert place.record.exited
    assert place.record.failure == ""
    assert gone(started.pid)


def test_sigterm_ends_it_cleanly(place: Pod) -> None:
    place.serve_agent()
    place.start(SERVER)
    child = int(place.line_with("child").split()[1])
    assert place.process is not None
    place.process.send_signal(signal.SIGTERM)
    assert place.wait()[0] == 0
    assert gone(child)
    assert place.record.exited
    assert not place.record.failure


def test_sigterm_while_it_waits(place: Pod) -> None:
    process = place.start("print('never')")
    place.line_with("waiting")
    process.send_signal(signal.SIGTERM)
    code, output = place.wait()
    assert code == 0
    assert "never" not in output


def test_an_engine_that_ignores_sigterm_is_killed(place: Pod) -> None:
    place.serve_agent()
    stubborn = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\n"
    process = place.start(stubborn + "time.sleep(600)")
    place.line_with("up")
    process.send_signal(signal.SIGTERM)
    assert place.wait()[0] == 0
    assert place.record.exit_code == -signal.SIGKILL


def test_a_start_that_takes_too_long_is_ended(place: Pod) -> None:
    place.serve_agent()
    place.start("import time\nprint('loading', flush=True)\ntime.sleep(600)", **{pod.ENV_STARTUP_TIMEOUT: "1"})
    assert place.wait()[0] == 1
    assert place.record.failure == (
        "SGLang was killed: it was not ready 1 s after its start (engine.startupTimeoutSeconds); "
        "its last words: loading"
    )


def test_weights_that_a_silent_rank_could_not_load_end_the_engine(place: Pod) -> None:
    place.serve_agent()
    place.start("import time\nprint('[x TP1] Failed to get weights iterator: gone', flush=True)\ntime.sleep(600)")
    assert place.wait()[0] == 1
    assert "one of its ranks could not load the new weights" in place.record.failure


def test_orphans_of_the_engine_are_reaped_and_killed(place: Pod) -> None:
    place.serve_agent()
    program = (
        "import os, sys, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    print('orphan', os.getpid(), flush=True); time.sleep(600)\n"
        "os.waitpid(pid, 0); time.sleep(0.5); sys.exit(7)\n"
    )
    place.start(program)
    orphan = int(place.line_with("orphan").split()[1])
    assert place.wait()[0] == 7
    assert gone(orphan)


def test_the_record_is_what_the_protocol_says(place: Pod) -> None:
    place.serve_agent()
    place.start("print('x')")
    place.wait()
    written = json.loads((place.folder / pod.ENGINE_RECORD).read_text())
    assert set(written) == set(to_wire(place.record))
