"""What the pods of engines and routers have in common."""

from __future__ import annotations

from collections.abc import Collection

from ..protocol.pod import ENV_DRAIN_SECONDS
from .environment import literal
from .identity import Manifest
from .overlay import UnusableSpec

# A node that does not answer this long loses its pods, so that others can take their place.
LOST_NODE_SECONDS = 30


def lost_node_tolerations() -> list[Manifest]:
    """Kubernetes' own defaults wait five minutes."""
    return [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": LOST_NODE_SECONDS,
        }
        for taint in ("not-ready", "unreachable")
    ]


def http_probe(path: str, port: str, *, period: int, failures: int) -> Manifest:
    """A core/v1 Probe of a named port: every `period` seconds, given up after `failures` in a row."""
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "timeoutSeconds": 3,
        "periodSeconds": period,
        "failureThreshold": failures,
    }


def port(name: str, number: int) -> Manifest:
    """A core/v1 ContainerPort."""
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def with_drain_seconds(template: Manifest, containers: Collection[str], kill_seconds: int) -> Manifest:
    """`template` with ENV_DRAIN_SECONDS in these containers: the grace period less what the kill after it may take.
    The grace period is the user's to overlay, so this comes last. Raises UnusableSpec."""
    pod = template["spec"]
    grace = pod["terminationGracePeriodSeconds"]
    if not isinstance(grace, int):
        raise UnusableSpec(f"template.spec.terminationGracePeriodSeconds must be a whole number, not {grace!r}")
    drain = literal(ENV_DRAIN_SECONDS, max(0, grace - kill_seconds))

    def drained(container: Manifest) -> Manifest:
        return {**container, "env": [*container["env"], drain]} if container["name"] in containers else container

    lists = {kind: [drained(container) for container in pod[kind]] for kind in ("initContainers", "containers")}
    return {**template, "spec": {**pod, **lists}}
