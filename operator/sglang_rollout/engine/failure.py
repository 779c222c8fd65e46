"""The one sentence that says why an engine ended, from the last lines of its log and its exit status."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

MAX_SENTENCE = 600  # characters: it goes into conditions and the termination log

_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Failure)\b(?:: .*)?$")
# What breaks after something else has broken: never the cause while there is another candidate.
_CONSEQUENCE = re.compile(
    r"^(?:[\w.]*\.)?(EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|KeyboardInterrupt"
    r"|SystemExit|CancelledError)\b"
)
_ARGPARSE = re.compile(r": error: (.+)$")
_DIED = re.compile(r"\bexit ?code:? ?-(\d+)\b", re.IGNORECASE)
_LOG_PREFIX = re.compile(r"^\[[^\]]*\] ")


def failure_sentence(lines: Sequence[str], exit_code: int, out_of_memory: bool = False) -> str:
    """`exit_code` as subprocess gives it: negative for a signal. `out_of_memory`: the kernel's out-of-memory killer
    struck in this container since the engine started."""
    cause = _cause(lines)
    if out_of_memory:
        end = "SGLang ran out of memory and was killed by the kernel: raise the memory limit of engine.resources"
        return _bounded(end)
    end = f"SGLang was killed by {_signal(-exit_code)}" if exit_code < 0 else f"SGLang ended with exit code {exit_code}"
    return _bounded(f"{end}: {cause}" if cause else end)


def last_words(lines: Sequence[str]) -> str:
    """The last line that says something, without the log's time stamp."""
    for line in reversed(lines):
        if line.strip():
            return _bounded(_LOG_PREFIX.sub("", line.strip()))
    return ""


def _cause(lines: Sequence[str]) -> str:
    for line in reversed(lines):
        if usage := _ARGPARSE.search(line):
            return usage.group(1).strip()
    if exceptions := _exceptions(lines):
        return exceptions[-1]
    for line in reversed(lines):
        if died := _DIED.search(line):
            return f"one of its processes was killed by {_signal(int(died.group(1)))}"
    return last_words(lines)


def _exceptions(lines: Sequence[str]) -> list[str]:
    """The exception line of each traceback, consequences left out unless there is nothing else."""
    found: list[str] = []
    inside = False
    for line in lines:
        if _TRACEBACK in line:
            inside = True
        elif inside and line and not line[0].isspace():
            text = line.strip()
            if _EXCEPTION.match(text) or ": " in text:
                found.append(text)
            inside = False
    causes = [text for text in found if not _CONSEQUENCE.match(text)]
    return causes or found


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (from outside, or out of memory)" if name == "SIGKILL" else name


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_SENTENCE else text[: MAX_SENTENCE - 1] + "…"
