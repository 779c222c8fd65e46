"""Programs end within their deadline, daemons are known by more than a pid, locks exclude."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.cluster.errors import ClusterError
from e2e.cluster.lock import exclusive
from e2e.cluster.process import ProcessMark, daemon, run, start_daemon, stop_daemon, wait_for, write_atomically


def test_output_and_input_pass_through() -> None:
    assert run(["cat"], timeout=10, stdin="word").stdout == "word"


def test_failure_tells_code_and_output() -> None:
    with pytest.raises(ClusterError, match=r"exit code 3.*no such thing"):
        run(["sh", "-c", "echo no such thing >&2; exit 3"], timeout=10)


def test_failure_tells_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="deep reason"):
        run(["sh", "-c", "echo deep reason; exit 1"], timeout=10, log=tmp_path / "logs/x.log")


def test_missing_program_is_named() -> None:
    with pytest.raises(ClusterError, match="no-such-program is not installed"):
        run(["no-such-program"], timeout=10)


def test_deadline_ends_the_whole_process_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    begin = time.monotonic()
    with pytest.raises(ClusterError, match="not done after"):
        run(["sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"], timeout=0.5)
    assert time.monotonic() - begin < 10
    wait_for("the grandchild to be gone", lambda: ProcessMark.of(int(pid_file.read_text())) is None, timeout=5)


def test_daemon_is_found_by_its_mark_and_stopped(tmp_path: Path) -> None:
    mark = tmp_path / "run/sleeper.json"
    started = start_daemon(["sleep", "60"], mark=mark, log=tmp_path / "log")
    try:
        assert daemon(mark) == started
    finally:
        stop_daemon(mark)
    assert not started.alive
    assert not mark.exists()
    assert daemon(mark) is None
    with pytest.raises(ChildProcessError):  # it was reaped, however fast it ended
        os.waitpid(started.pid, os.WNOHANG)


def test_a_pid_used_again_is_not_taken_for_the_daemon(tmp_path: Path) -> None:
    mine = ProcessMark.of(os.getpid())
    assert mine is not None
    mark = tmp_path / "mark.json"
    mark.write_text(json.dumps({"pid": mine.pid, "start_ticks": mine.start_ticks - 1}))
    assert daemon(mark) is None
    stop_daemon(mark)  # must not signal us
    assert not mark.exists()


def test_lock_is_exclusive_and_ends_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom e2e.cluster.lock import exclusive\n"
        "with exclusive(Path(sys.argv[1]), 'x', timeout=5):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=env) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ClusterError, match="another process has held"), exclusive(path, "x", timeout=0.1):
            pass
        holder.kill()
    with exclusive(path, "x", timeout=5):
        pass


def test_wait_for_gives_up_with_what_it_waited_for() -> None:
    with pytest.raises(ClusterError, match=r"waited .* for: rain"):
        wait_for("rain", lambda: False, timeout=0.05, every=0.01)


def test_atomic_write_leaves_no_other_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "deep/state", "text")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["state"]
