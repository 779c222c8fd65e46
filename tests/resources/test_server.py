"""A real API server takes every manifest, by strict server-side apply, and Pod Security lets the pods in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sglang_rollout.resources import Manifest
from tests.resources.fleets import SPECS, all_children, fleet, pod_templates

pytestmark = pytest.mark.apiserver

_CORE = {"Service": "services", "ServiceAccount": "serviceaccounts", "ConfigMap": "configmaps", "Pod": "pods"}
_PLURALS = {
    **_CORE,
    "StatefulSet": "statefulsets",
    "Deployment": "deployments",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "NetworkPolicy": "networkpolicies",
}


def _path(manifest: Manifest) -> str:
    version, metadata = manifest["apiVersion"], manifest["metadata"]
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    return f"{root}/namespaces/{metadata['namespace']}/{_PLURALS[manifest['kind']]}/{metadata['name']}"


def _apply(kubernetes: httpx.Client, manifest: Manifest, *, dry_run: bool = False) -> httpx.Response:
    parameters = {"fieldManager": "sglang-rollout", "force": "true", "fieldValidation": "Strict"}
    if dry_run:
        parameters["dryRun"] = "All"
    headers = {"Content-Type": "application/apply-patch+yaml"}
    return kubernetes.patch(_path(manifest), params=parameters, headers=headers, json=manifest)


def _namespace(kubernetes: httpx.Client, name: str, **labels: str) -> str:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    response = kubernetes.post("/api/v1/namespaces", json=body)
    assert response.is_success, response.text
    return name


EXAMPLES = {
    path.name: yaml.safe_load(path.read_text())["spec"]
    for path in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
}


@pytest.mark.parametrize("spec", [*SPECS.values(), *EXAMPLES.values()], ids=[*SPECS, *EXAMPLES])
def test_every_manifest_passes_a_strict_server_side_apply(kubernetes: httpx.Client, spec: dict[str, Any]) -> None:
    for manifest in all_children(fleet(spec, namespace="default")):
        response = _apply(kubernetes, manifest, dry_run=True)
        assert response.is_success, f"{manifest['kind']}: {response.json()['message']}"
        # Deprecated or duplicated things come back as warnings.
        assert "warning" not in response.headers, response.headers["warning"]


@pytest.mark.parametrize("name", SPECS)
def test_applied_again_it_changes_nothing(kubernetes: httpx.Client, name: str) -> None:
    """Nothing in a manifest fights with a default of the server."""
    namespace = _namespace(kubernetes, f"twice-{name}")
    for manifest in all_children(fleet(SPECS[name], namespace=namespace)):
        first, second = _apply(kubernetes, manifest), _apply(kubernetes, manifest)
        assert first.is_success, first.text
        assert first.json()["metadata"]["resourceVersion"] == second.json()["metadata"]["resourceVersion"]


def test_a_smaller_spec_removes_what_it_no_longer_has(kubernetes: httpx.Client) -> None:
    """One field manager, whole manifests: a field left out of the second apply is gone, not left behind."""
    namespace = _namespace(kubernetes, "shrink")
    for spec in (SPECS["overlay"], SPECS["minimal"]):
        manifests = all_children(fleet(spec, namespace=namespace))
        applied = [_apply(kubernetes, one).json() for one in manifests if one["kind"] == "StatefulSet"]
    pod = applied[0]["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["containers"]] == ["engine"]
    assert [one["name"] for one in pod["initContainers"]] == ["inject", "agent"]
    assert "nodeSelector" not in pod
    assert "python" not in {volume["name"] for volume in pod["volumes"]}


RESTRICTED: dict[str, Any] = {
    **SPECS["minimal"],
    "model": {"path": "/models/a", "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "engine": {
        "image": "engine:1",
        "template": {"spec": {"securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}}},
    },
    "router": {"replicas": 2, "auth": {"secretKeyRef": {"name": "s", "key": "k"}}},
}


def _create_pod(kubernetes: httpx.Client, namespace: str, template: Manifest) -> httpx.Response:
    metadata = {"name": "p", "namespace": namespace, **template["metadata"]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    return kubernetes.post(f"/api/v1/namespaces/{namespace}/pods", json=body, params={"dryRun": "All"})


def test_pod_security_restricted_lets_the_pods_in(kubernetes: httpx.Client) -> None:
    namespace = _namespace(kubernetes, "restricted", **{"pod-security.kubernetes.io/enforce": "restricted"})
    for template in pod_templates(all_children(fleet(RESTRICTED, namespace=namespace))):
        response = _create_pod(kubernetes, namespace, template)
        assert response.is_success, response.json()["message"]


def test_an_image_that_runs_as_root_lacks_only_that(kubernetes: httpx.Client) -> None:
    """What keeps an engine of a root image out of a restricted namespace is that image's user alone."""
    namespace = _namespace(kubernetes, "root-image", **{"pod-security.kubernetes.io/enforce": "restricted"})
    router, engine = pod_templates(all_children(fleet(SPECS["minimal"], namespace=namespace)))
    assert _create_pod(kubernetes, namespace, router).is_success
    response = _create_pod(kubernetes, namespace, engine)
    assert response.status_code == 403
    assert re.findall(r"(\w+) != ", response.json()["message"]) == ["runAsNonRoot"]
    baseline = _namespace(kubernetes, "baseline", **{"pod-security.kubernetes.io/enforce": "baseline"})
    assert _create_pod(kubernetes, baseline, engine).is_success
