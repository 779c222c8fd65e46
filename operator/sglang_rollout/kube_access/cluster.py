"""What is asked of the API server: the fleets of a namespace, their changes, and their pods."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

from ..api.group import GROUP, PLURAL, VERSION
from .connection import Connection, Object, failure_of
from .failures import Expired, Forbidden, NotFound, Unreachable

WATCH_SECONDS = 240.0
SILENCE_SECONDS = 80.0  # the server sends a bookmark about every 60 s
POLL_SECONDS = 1.0


class Cluster:
    """The namespace that commands act on. field_manager: by which its changes are known. Failures are those of
    `failures`."""

    def __init__(self, connection: Connection, field_manager: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self.connection = connection
        self.namespace = connection.namespace
        self._field_manager = field_manager
        self._sleep = sleep

    # Fleets

    def rollout(self, name: str) -> Object:
        return self.connection.call("GET", self._path(name))

    def rollouts(self) -> list[Object]:
        items: list[Object] = self.connection.call("GET", self._path())["items"]
        return items

    def patch(self, name: str, spec: Object, resource_version: str = "") -> Object:
        """Merge-patch `spec` and nothing else; returns the object as it is then. resource_version: raises Conflict
        when the object is another one by now."""
        body: Object = {"spec": spec}
        if resource_version:
            body["metadata"] = {"resourceVersion": resource_version}
        query = {"fieldManager": self._field_manager, "fieldValidation": "Strict"}
        try:
            return self.connection.call("PATCH", self._path(name), body, **query)
        except Unreachable as error:
            raise Unreachable(f"{error.message}; whether the change was made is not known") from error

    def follow(self, name: str, left: Callable[[], float], tell: Callable[[str], None]) -> Iterator[Object]:
        """The fleet now and after each change, while there are seconds `left`. An API server that is away is waited
        for (`tell` says so); who may not watch reads every second. Raises NotFound when the fleet is deleted."""
        watching = True
        trouble = ""
        while left() > 0:
            try:
                current = self.rollout(name)
                trouble = ""
                yield current
                if watching:
                    yield from self._changes(name, current["metadata"]["resourceVersion"], left)
                    continue
            except Expired:
                continue
            except Unreachable as error:
                if trouble != error.message:
                    trouble = error.message
                    tell(f"{error.message}; trying again")
            except Forbidden:
                if not watching:
                    raise
                watching = False
                continue
            self._sleep(min(POLL_SECONDS, left()))

    def _changes(self, name: str, since: str, left: Callable[[], float]) -> Iterator[Object]:
        seconds = min(WATCH_SECONDS, max(1.0, left()))
        for kind, changed in self.watch(since, seconds, fieldSelector=f"metadata.name={name}"):
            if kind == "DELETED":
                raise NotFound(f'sglangrollout "{name}" was deleted meanwhile')
            if kind != "BOOKMARK":
                yield changed

    def watch(self, since: str, seconds: float, **selectors: str) -> Iterator[tuple[str, Object]]:
        """(type, object) of each change after resourceVersion `since`, for at most about `seconds`."""
        lines = self.connection.lines(
            self._path(),
            min(SILENCE_SECONDS, seconds + 5.0),
            watch="1",
            resourceVersion=since,
            allowWatchBookmarks="true",
            timeoutSeconds=str(max(1, int(seconds))),
            **selectors,
        )
        for line in lines:
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise failure_of(int(event["object"].get("code", 500)), json.dumps(event["object"]).encode())
            yield event["type"], event["object"]

    # Pods

    def pods(self, selector: str) -> list[Object]:
        items: list[Object] = self.connection.call("GET", self.pod_path(), labelSelector=selector)["items"]
        return items

    def pod_path(self, pod: str = "", subresource: str = "") -> str:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        return "/".join(part for part in (path, pod, subresource) if part)

    def _path(self, name: str = "") -> str:
        return f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/{PLURAL}" + (f"/{name}" if name else "")
