"""Fleets of every shape that the renderer knows, by name."""

from __future__ import annotations

from typing import Any

from sglang_rollout.api import SGLangRollout
from sglang_rollout.protocol.fleet import Trust, audience
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.resources import FleetContext, Manifest, fleet_children, headless_service, stateful_set

UID = "1f0b9c52-7d3e-4d6a-9a57-0c2d4b8e6f11"

CONTEXT = FleetContext(
    operator_namespace="sglang-rollout-system",
    operator_pod_labels={"app.kubernetes.io/name": "sglang-rollout", "app.kubernetes.io/component": "operator"},
    agent_image="sglang-rollout/agent:0.1.0",
    router_image="sglang-rollout/router:0.1.0",
    trust=Trust(
        audience=audience(UID),
        issuer="https://kubernetes.default.svc.cluster.local",
        callers=["system:serviceaccount:sglang-rollout-system:sglang-rollout"],
        jwks={"keys": [{"use": "sig", "kty": "RSA", "kid": "k1", "alg": "RS256", "n": "AQAB", "e": "AQAB"}]},
    ),
)
BOOT = WeightVersion(version="42", path="/models/step-42")

SPECS: dict[str, dict[str, Any]] = {
    "minimal": {"model": {"path": "/models/qwen3-8b"}, "engine": {"image": "lmsysorg/sglang:v0.5.23"}},
    "multi-node": {
        "replicas": 4,
        "model": {
            "path": "/models/Qwen3-235B",
            "servedName": "qwen3",
            "volume": {"persistentVolumeClaim": {"claimName": "models"}},
        },
        "engine": {
            "image": "lmsysorg/sglang:v0.5.23",
            "nodes": 2,
            "tensorParallelSize": 16,
            "dataParallelSize": 2,
            "expertParallelSize": 16,
            "args": ["--enable-dp-attention", "--mem-fraction-static=0.8"],
            "env": [
                {"name": "NCCL_DEBUG", "value": "INFO"},
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
            ],
            "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "512Gi"}},
            "sharedMemorySize": "64Gi",
        },
        "agent": {"image": "registry.example/agent:2", "resources": {"limits": {"cpu": 2, "memory": "4Gi"}}},
        "router": {
            "replicas": 2,
            "args": ["--log-level", "debug"],
            "resources": {"requests": {"cpu": "500m"}},
            "auth": {"secretKeyRef": {"name": "qwen3-router", "key": "token"}},
        },
        "scheduling": {"schedulerName": "volcano"},
        "network": {
            "hostNetwork": True,
            "trainers": [
                {"namespaceSelector": {"matchLabels": {"team": "rl"}}, "podSelector": {}},
                {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
            ],
        },
    },
    "external-router": {
        "model": {"path": "Qwen/Qwen3-8B"},
        "engine": {"image": "lmsysorg/sglang:v0.5.23", "tensorParallelSize": 2},
        "router": {"external": {"url": "http://router.example:30000"}},
    },
    "overlay": {
        "model": {"path": "/models/qwen3-v1", "volume": {"hostPath": {"path": "/srv/models", "type": "Directory"}}},
        "engine": {
            "image": "sglang-rollout/engine-cpu:dev",
            "args": ["--device=cpu"],
            "template": {
                "metadata": {"labels": {"team": "rl"}, "annotations": {"example.org/cost": "gpu"}},
                "spec": {
                    "nodeSelector": {"pool": "gpu"},
                    "terminationGracePeriodSeconds": 600,
                    "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
                    "tolerations": [
                        {"key": "nvidia.com/gpu", "operator": "Exists"},
                        {
                            "key": "node.kubernetes.io/not-ready",
                            "operator": "Exists",
                            "effect": "NoExecute",
                            "tolerationSeconds": 5,
                        },
                    ],
                    "volumes": [{"name": "python", "hostPath": {"path": "/opt/sglang-cpu"}}],
                    "initContainers": [
                        {"name": "agent", "volumeMounts": [{"name": "python", "mountPath": "/opt/sglang-cpu"}]},
                        {"name": "fetch", "image": "busybox:1", "command": ["true"]},
                    ],
                    "containers": [
                        {
                            "name": "engine",
                            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                            "volumeMounts": [{"name": "python", "mountPath": "/opt/sglang-cpu", "readOnly": True}],
                            "securityContext": {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}},
                        },
                        {"name": "logs", "image": "busybox:1", "command": ["sleep", "inf"], "ports": []},
                    ],
                },
            },
        },
        "router": {"template": {"spec": {"priorityClassName": "high", "terminationGracePeriodSeconds": 120}}},
    },
}


def fleet(spec: dict[str, Any], name: str = "qwen3-8b", namespace: str = "rl") -> SGLangRollout:
    return SGLangRollout.from_object(
        {"metadata": {"name": name, "namespace": namespace, "uid": UID, "generation": 1}, "spec": spec}
    )


def all_children(rollout: SGLangRollout, engines: int = 1) -> list[Manifest]:
    """Those of the fleet and those of its first engines, in the order in which they are applied."""
    children = list(fleet_children(rollout, CONTEXT, BOOT))
    for index in range(engines):
        children += (headless_service(rollout, index), stateful_set(rollout, CONTEXT, index))
    return children


def of_kind(children: list[Manifest], kind: str, name: str = "") -> Manifest:
    """The one child of this kind (and this name)."""
    found = [one for one in children if one["kind"] == kind and name in ("", one["metadata"]["name"])]
    assert len(found) == 1, [one["metadata"]["name"] for one in found]
    return found[0]


def pod_templates(children: list[Manifest]) -> list[Manifest]:
    return [one["spec"]["template"] for one in children if one["kind"] in ("StatefulSet", "Deployment")]


def containers(template: Manifest) -> dict[str, Manifest]:
    """All containers of a pod by name, init containers and sidecars too."""
    pod = template["spec"]
    return {one["name"]: one for one in [*pod.get("initContainers", []), *pod["containers"]]}


def environment(container: Manifest) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in container.get("env", [])}
