"""Log lines of many pods as one stream: order within a pod, no line twice after a reconnect."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]

_STAMPED = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) ?(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """time: RFC 3339 with nanoseconds, as the kubelet stamps it; empty for a line without."""

    pod: str
    container: str
    time: str
    text: str


@dataclass
class Cursor:
    """Where the stream of one container is: what came before is not shown again."""

    pod: str
    container: str
    last: str = ""
    _at_last: list[str] = field(default_factory=list)

    def take(self, raw: str) -> Line | None:
        """The line, or None for one that was shown. Lines of one nanosecond are told apart by their text."""
        matched = _STAMPED.match(raw)
        if matched is None:
            return Line(self.pod, self.container, "", raw)
        time, text = matched.groups()
        if time < self.last or (time == self.last and text in self._at_last):
            return None
        if time > self.last:
            self._at_last.clear()
        self.last = time
        self._at_last.append(text)
        return Line(self.pod, self.container, time, text)


def container_names(pod: Object) -> list[str]:
    """Init containers (native sidecars are among them) first."""
    spec = pod.get("spec", {})
    return [str(one["name"]) for one in [*spec.get("initContainers", []), *spec.get("containers", [])]]


def starts_of(pod: Object, container: str) -> str:
    """Identity of the container's present run; empty: it has not started yet."""
    status = pod.get("status", {})
    states = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return str(next((one.get("containerID", "") for one in states if one.get("name") == container), "") or "")


def prefix_width(pods: Iterable[str]) -> int:
    return max((len(pod) for pod in pods), default=0)
