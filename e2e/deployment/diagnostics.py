"""What to look at when something failed: conditions, pods, events and last log lines; all of it kept in a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from e2e.cluster import Cluster, ClusterError
from e2e.cluster.layout import cache_root
from e2e.deployment.fleet import describe
from sglang_rollout.api import PLURAL, SGLangRollout

LOG_LINES = 25
KEPT_FOLDERS = 10


def collect(cluster: Cluster, namespaces: Iterable[str], title: str) -> tuple[str, Path]:
    """A short account for the terminal, and the folder that has everything."""
    folder = _new_folder(title)
    parts: list[str] = []
    for namespace in namespaces:
        parts += _namespace(cluster, namespace, folder)
    parts.append(f"more in {folder}")
    account = "\n".join(parts)
    (folder / "summary.txt").write_text(account)
    return account, folder


def _new_folder(title: str) -> Path:
    root = cache_root() / "diagnostics"
    root.mkdir(parents=True, exist_ok=True)
    for old in sorted(path for path in root.iterdir() if path.is_dir())[: -KEPT_FOLDERS + 1]:
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    word = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in title)[:60]
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{word}"
    folder.mkdir(exist_ok=True)
    return folder


def _namespace(cluster: Cluster, namespace: str, folder: Path) -> list[str]:
    parts = []
    for item in _items(cluster, namespace, PLURAL):
        rollout = SGLangRollout.from_object(item)
        parts.append(f"{namespace}/{rollout.metadata.name}:\n{describe(rollout)}")
        _keep(folder / f"{namespace}.{rollout.metadata.name}.json", json.dumps(item, indent=1))
    parts.append(f"pods of {namespace}:\n{_ask(cluster, '-n', namespace, 'get', 'pods', '-o', 'wide')}")
    events = _ask(cluster, "-n", namespace, "get", "events", "--sort-by=.lastTimestamp")
    _keep(folder / f"{namespace}.events.txt", events)
    warnings = [line for line in events.splitlines() if " Warning " in line][-8:]
    if warnings:
        parts.append(f"last warnings of {namespace}:\n" + "\n".join(f"  {line[:300]}" for line in warnings))
    for pod in _items(cluster, namespace, "pods"):
        parts += _pod(cluster, namespace, pod, folder)
    return parts


def _pod(cluster: Cluster, namespace: str, pod: dict[str, Any], folder: Path) -> list[str]:
    """Logs of every container are kept; those of containers that are not well are shown."""
    name = pod["metadata"]["name"]
    _keep(folder / f"{namespace}.{name}.pod.json", json.dumps(pod, indent=1))
    status = pod.get("status", {})
    shown = []
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        words = ("-n", namespace, "logs", name, "-c", container["name"])
        log = _ask(cluster, *words)
        _keep(folder / f"{namespace}.{name}.{container['name']}.log", log)
        if container.get("restartCount"):
            log_before = _ask(cluster, *words, "--previous")
            _keep(folder / f"{namespace}.{name}.{container['name']}.previous.log", log_before)
        finished = container.get("state", {}).get("terminated", {}).get("exitCode") == 0
        if not finished and (not container.get("ready") or container.get("restartCount")):
            tail = "\n".join(f"  {line[:240]}" for line in log.splitlines()[-LOG_LINES:])
            shown.append(f"last lines of {namespace}/{name}, container {container['name']}:\n{tail}")
    return shown


def _items(cluster: Cluster, namespace: str, resource: str) -> list[dict[str, Any]]:
    shown = _ask(cluster, "-n", namespace, "get", resource, "-o", "json")
    try:
        items: list[dict[str, Any]] = json.loads(shown)["items"]
    except (ValueError, KeyError):
        return []
    return items


def _ask(cluster: Cluster, *words: str) -> str:
    """What kubectl says, or why it says nothing: one missing answer must not hide the others."""
    try:
        return cluster.kubectl(*words, timeout=30)
    except ClusterError as error:
        return f"({error})"


def _keep(path: Path, text: str) -> None:
    path.write_text(text)
