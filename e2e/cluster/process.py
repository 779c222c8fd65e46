"""Programs run with a deadline, and daemons that are known by their pid and start time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | bytes | None = None,
    log: Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run to the end within `timeout` seconds; output is returned, or appended to `log`.

    `env` is added to this process's environment. Raises ClusterError with the last lines of the output when the
    program fails (unless `check` is off) or the time is over; its whole process group is ended then.
    """
    command = [str(word) for word in argv]
    payload = stdin.encode() if isinstance(stdin, str) else stdin
    with contextlib.ExitStack() as stack:
        if log is None:
            out: int | object = subprocess.PIPE
            err: int | object = subprocess.PIPE
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            out = stack.enter_context(log.open("ab"))
            err = subprocess.STDOUT
        try:
            child = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                stdin=subprocess.DEVNULL if payload is None else subprocess.PIPE,
                stdout=out,  # type: ignore[arg-type]
                stderr=err,  # type: ignore[arg-type]
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise ClusterError(f"{command[0]} is not installed") from error
        try:
            stdout, stderr = child.communicate(payload, timeout=timeout)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ClusterError(f"{_brief(command)}: not done after {timeout:.0f} s{_tail(log)}") from error
            raise
    result = subprocess.CompletedProcess(
        command, child.returncode, (stdout or b"").decode(errors="replace"), (stderr or b"").decode(errors="replace")
    )
    if check and result.returncode != 0:
        output = (result.stderr.strip() or result.stdout.strip())[-2000:]
        raise ClusterError(f"{_brief(command)}: exit code {result.returncode}{_tail(log) or f': {output}'}")
    return result


def _brief(command: Sequence[str]) -> str:
    text = " ".join([Path(command[0]).name, *command[1:]])
    return text if len(text) <= 160 else text[:157] + "..."


def _tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 16384))
        lines = stream.read().decode(errors="replace").splitlines()[-15:]
    return f"; the end of {log}:\n  " + "\n  ".join(lines)


def wait_for(what: str, probe: Callable[[], bool], *, timeout: float, every: float = 0.5) -> float:
    """Call `probe` until it is true; returns the seconds that took. Raises ClusterError when `timeout` is over."""
    begin = time.monotonic()
    while True:
        if probe():
            return time.monotonic() - begin
        if time.monotonic() - begin > timeout:
            raise ClusterError(f"waited {timeout:.0f} s for: {what}")
        time.sleep(every)


@dataclass(frozen=True)
class ProcessMark:
    """A process by pid and start time, so that a pid used again is never taken for it."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessMark | None:
        """The mark of a running process; None when there is none, or only a zombie."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return ProcessMark.of(self.pid) == self


_children: dict[int, subprocess.Popen[bytes]] = {}
"""Daemons that this very process started: they are its children until it ends, and have to be reaped."""


def start_daemon(
    argv: Sequence[str | Path], *, mark: Path, log: Path, env: Mapping[str, str] | None = None
) -> ProcessMark:
    """Start a program that outlives us, in a session of its own; its mark is written to the file `mark`."""
    for parent in (mark.parent, log.parent):
        parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        child = subprocess.Popen(
            [str(word) for word in argv],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    _children[child.pid] = child
    known = ProcessMark.of(child.pid)
    if known is None:
        raise ClusterError(f"{Path(argv[0]).name} ended at once{_tail(log)}")
    write_atomically(mark, json.dumps({"pid": known.pid, "start_ticks": known.start_ticks}))
    return known


def daemon(mark: Path) -> ProcessMark | None:
    """The running daemon that `start_daemon` wrote to `mark`, if it still runs."""
    if not mark.exists():
        return None
    known = ProcessMark(**json.loads(mark.read_text()))
    return known if known.alive else None


def stop_daemon(mark: Path, *, grace: float = 30) -> None:
    """Ask the daemon to end, insist after `grace` seconds, and forget its mark."""
    known = daemon(mark)
    if known is not None:
        for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(known.pid, number)
            deadline = time.monotonic() + patience
            while known.alive and time.monotonic() < deadline:
                _reap(known.pid)
                time.sleep(0.1)
            if not known.alive:
                break
        else:
            raise ClusterError(f"process {known.pid} ({mark.stem}) does not end, not even by SIGKILL")
        _reap(known.pid)
    mark.unlink(missing_ok=True)


def _reap(pid: int) -> None:
    """Collect the process if it is a child of ours; a daemon of an earlier run is not."""
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path`, then rename, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)
