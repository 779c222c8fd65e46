"""The kinds of the Kubernetes API that the operator reads or writes, and their URLs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..api import group

Object = dict[str, Any]
"""An object of the Kubernetes API as plain JSON."""


@dataclass(frozen=True)
class Kind:
    """Where objects of one kind live. plural: the word of the URL."""

    kind: str
    api_version: str
    plural: str

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path of an object, or of all in a namespace, or (namespace None) of all in the cluster."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        parts = [root]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


ROLLOUT = Kind(group.KIND, group.API_VERSION, group.PLURAL)
POD = Kind("Pod", "v1", "pods")
STATEFUL_SET = Kind("StatefulSet", "apps/v1", "statefulsets")
DEPLOYMENT = Kind("Deployment", "apps/v1", "deployments")
SERVICE = Kind("Service", "v1", "services")
CONFIG_MAP = Kind("ConfigMap", "v1", "configmaps")
SERVICE_ACCOUNT = Kind("ServiceAccount", "v1", "serviceaccounts")
DISRUPTION_BUDGET = Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets")
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")
LEASE = Kind("Lease", "coordination.k8s.io/v1", "leases")
EVENT = Kind("Event", "events.k8s.io/v1", "events")
CORE_EVENT = Kind("Event", "v1", "events")  # its list can be filtered by reason; events.k8s.io has no such field
NAMESPACE = Kind("Namespace", "v1", "namespaces")

# What a fleet is made of, beside its pods. The first group must be there before pods start.
SUPPORTING_KINDS = (SERVICE_ACCOUNT, CONFIG_MAP, SERVICE, NETWORK_POLICY, DISRUPTION_BUDGET)
WORKLOAD_KINDS = (STATEFUL_SET, DEPLOYMENT)
CHILD_KINDS = (*SUPPORTING_KINDS, *WORKLOAD_KINDS)

BY_NAME = {kind.kind: kind for kind in (*CHILD_KINDS, POD)}


def object_key(value: Object) -> tuple[str, str]:
    """(namespace, name); the namespace is empty for what has none."""
    metadata = value["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def resource_version(value: Object) -> int:
    """As a number: newer objects of one kind have higher ones (Kubernetes guarantees the order since 1.35 and has
    always kept it for what is in etcd). 0 when there is none."""
    text = value.get("metadata", {}).get("resourceVersion", "")
    return int(text) if text.isdigit() else 0
