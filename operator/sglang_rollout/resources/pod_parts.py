"""What the pods of engines and routers have in common."""

from __future__ import annotations

from .identity import Manifest

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
