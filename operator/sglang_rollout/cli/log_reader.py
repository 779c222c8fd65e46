"""Reads the logs of a fleet's pods at once, over restarts, new pods and cut connections."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.text import Text

from ..kube_access.failures import Failure, NotFound, Unreachable
from .invocation import Invocation
from .log_lines import Cursor, Line, container_names, prefix_width, starts_of

RELIST_SECONDS = 2.0
READ_SECONDS = 60.0
BACKLOG_LINES = 10000
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


@dataclass(frozen=True)
class Selection:
    """Which lines. since: seconds back; tail: lines of each pod at first."""

    selector: str
    container: str
    since: float | None
    tail: int | None
    previous: bool = False


@dataclass
class LogReader:
    """Streams in threads of their own; lines come through one queue and are printed by the caller's thread."""

    invocation: Invocation
    selection: Selection
    timestamps: bool
    _cursors: dict[str, Cursor] = field(default_factory=dict)
    _threads: dict[str, threading.Thread] = field(default_factory=dict)
    _shown_runs: dict[str, str] = field(default_factory=dict)
    _lines: queue.Queue[Line | Failure] = field(default_factory=lambda: queue.Queue(BACKLOG_LINES))
    _width: int = 0

    def once(self) -> None:
        """What there is now, pod by pod. Raises the failure of the last pod when none could be read."""
        pods = self._pods()
        if not pods:
            raise NotFound(self._nothing())
        failures: list[Failure] = []
        for pod, _, _ in pods:
            try:
                for raw in self._read(pod, follow=False, since_time=""):
                    if (line := self._cursor(pod, pod).take(raw)) is not None:
                        self._print(line)
            except Failure as failure:
                failures.append(failure)
                self.invocation.say(f"{pod}: {failure.message}")
        if len(failures) == len(pods):
            raise failures[-1]

    def follow(self) -> None:
        """Until interrupted. Pods are looked for again and again; a container that restarts is read again."""
        told = ""
        due = 0.0
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + RELIST_SECONDS
                trouble = self._look()
                if trouble and trouble != told:
                    self.invocation.say(trouble)
                told = trouble
            with contextlib.suppress(queue.Empty):
                item = self._lines.get(timeout=max(0.0, min(0.5, due - time.monotonic())))
                if isinstance(item, Failure):
                    self.invocation.say(item.message)
                else:
                    self._print(item)

    def _look(self) -> str:
        """Starts what is to be read; a sentence where nothing is, or the API server is away."""
        try:
            pods = self._pods()
        except Unreachable as error:
            return f"{error.message}; trying again"
        for pod, uid, run in pods:
            self._stream(pod, uid, run)
        return "" if pods else f"{self._nothing()}; waiting for one"

    def _pods(self) -> list[tuple[str, str, str]]:
        """(name, UID, present run of the container) of the pods that have it, by name."""
        wanted = self.selection.container
        pods = self.invocation.cluster.pods(self.selection.selector)
        known = [pod for pod in pods if wanted in container_names(pod)]
        if pods and not known:
            raise Failure(f"no pod has a container {wanted}: try -c with one of {', '.join(container_names(pods[0]))}")
        found = [(pod["metadata"]["name"], pod["metadata"]["uid"], starts_of(pod, wanted)) for pod in known]
        self._width = max(self._width, prefix_width(pod for pod, _, _ in found))
        return sorted(found)

    def _stream(self, pod: str, uid: str, run: str) -> None:
        """Starts to read a run of the container that is not being read and was not read to its end."""
        running = self._threads.get(uid)
        if not run or (running is not None and running.is_alive()) or self._shown_runs.get(uid) == run:
            return
        self._shown_runs[uid] = run
        cursor = self._cursor(pod, uid)
        thread = threading.Thread(target=self._pump, args=(pod, uid, cursor), name=f"log {pod}", daemon=True)
        self._threads[uid] = thread
        thread.start()

    def _pump(self, pod: str, uid: str, cursor: Cursor) -> None:
        try:
            for raw in self._read(pod, follow=True, since_time=cursor.last):
                if (line := cursor.take(raw)) is not None:
                    self._lines.put(line)
        except NotFound:
            return  # the pod is gone; a new one has another UID
        except Failure as failure:
            # Cut off in the middle: the next look at the pods starts it again, from the last line.
            self._shown_runs.pop(uid, None)
            self._lines.put(Failure(f"{pod}: {failure.message}"))

    def _read(self, pod: str, *, follow: bool, since_time: str) -> Iterator[str]:
        """Lines with their times. since_time: go on after it; empty: begin as the selection says."""
        chosen = self.selection
        query = {"container": chosen.container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if chosen.previous:
            query["previous"] = "true"
        if since_time:
            query["sinceTime"] = since_time
        else:
            if chosen.since is not None:
                query["sinceSeconds"] = str(max(1, math.ceil(chosen.since)))
            if chosen.tail is not None:
                query["tailLines"] = str(chosen.tail)
        path = self.invocation.cluster.pod_path(pod, "log")
        return self.invocation.cluster.connection.lines(path, None if follow else READ_SECONDS, **query)

    def _cursor(self, pod: str, key: str) -> Cursor:
        return self._cursors.setdefault(key, Cursor(pod, self.selection.container))

    def _nothing(self) -> str:
        return f"no pods with {self.selection.selector} in namespace {self.invocation.cluster.namespace}"

    def _print(self, line: Line) -> None:
        if self.invocation.json_output:
            value = {"pod": line.pod, "container": line.container, "time": line.time, "text": line.text}
            self.invocation.print_json(value, compact=True)
            return
        colour = _COLOURS[zlib.crc32(line.pod.encode()) % len(_COLOURS)]
        text = Text.assemble((line.pod.ljust(self._width), colour), " ")
        if self.timestamps and line.time:
            text.append(f"{line.time} ", "dim")
        # The engines' own colours go: they would run over into the next line.
        text.append(Text.from_ansi(line.text).plain)
        self.invocation.out.print(text, soft_wrap=True)
