"""The chart on a real API server: it installs, upgrades and leaves the CRD; its rights are enough for what the
operator does and for nothing else; trainers are held to their fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from e2e.cluster.apiserver import ApiServer
from sglang_rollout.api import API_VERSION, KIND
from tests.chart.rendering import (
    CHART,
    EVERYTHING,
    NAMESPACE,
    RELEASE,
    VARIANTS,
    helm,
    pod_template,
    render,
    values_arguments,
)
from tests.resources.fleets import SPECS, all_children, fleet

pytestmark = pytest.mark.apiserver

Object = dict[str, Any]
TRAINER = "system:serviceaccount:rl:trainer"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
APPLY = {"Content-Type": "application/apply-patch+yaml"}
MERGE = {"Content-Type": "application/merge-patch+json"}
ROLLOUTS = "/apis/rollout.sglang.io/v1alpha1/namespaces/rl/sglangrollouts"


class Account:
    """The API as one account sees it (the admin impersonates it)."""

    def __init__(self, http: httpx.Client, user: str | None = None) -> None:
        self._http = http
        self._headers = {}
        if user is not None:
            self._headers = {"Impersonate-User": user, "Impersonate-Group": "system:serviceaccounts"}

    def call(
        self, method: str, path: str, body: Object | None = None, headers: Object | None = None, **query: str
    ) -> httpx.Response:
        return self._http.request(method, path, json=body, params=query, headers={**self._headers, **(headers or {})})

    def apply(self, manifest: Object, **query: str) -> httpx.Response:
        query = {"fieldManager": "sglang-rollout", "force": "true", "fieldValidation": "Strict", **query}
        return self.call("PATCH", path_of(manifest), manifest, APPLY, **query)


def path_of(manifest: Object) -> str:
    version, metadata, kind = manifest["apiVersion"], manifest["metadata"], manifest["kind"]
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    namespace = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    plural = f"{kind.lower()}s".replace("policys", "policies")
    return f"{root}{namespace}/{plural}/{metadata['name']}"


def eventually(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def http(server: ApiServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, verify=server.ssl_context(), timeout=30) as client:
        for name in ("rl", "team-a", "team-b"):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            assert client.post("/api/v1/namespaces", json=body).is_success
        yield client


@pytest.fixture(scope="module")
def installed(server: ApiServer, http: httpx.Client) -> Account:
    """The release with the trainer policy, and the API as the cluster's admin."""
    values = values_arguments({"trainerAccounts": [TRAINER]})
    helm("install", RELEASE, str(CHART), "--create-namespace", *values, kubeconfig=server.kubeconfig)
    admin = Account(http)
    eventually(lambda: admin.call("GET", ROLLOUTS).is_success, "the CRD is not served")
    return admin


@pytest.fixture
def rollout(installed: Account) -> Iterator[Object]:
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "qwen3-8b"}, "spec": SPECS["minimal"]}
    response = installed.call("POST", ROLLOUTS, body)
    assert response.is_success, response.text
    yield response.json()
    installed.call("DELETE", f"{ROLLOUTS}/qwen3-8b")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_passes_a_strict_server_side_apply(installed: Account, variant: str) -> None:
    for manifest in render(VARIANTS[variant]):
        if manifest["kind"] == "ServiceMonitor":
            continue  # no Prometheus operator here
        response = installed.apply(manifest, dryRun="All")
        assert response.is_success, f"{manifest['kind']}: {response.json()['message']}"
        assert "warning" not in response.headers, response.headers["warning"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_operators_pods_pass_pod_security_restricted(installed: Account, variant: str) -> None:
    name = f"restricted-{variant}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    assert installed.call("POST", "/api/v1/namespaces", body).is_success
    spec = {
        key: value
        for key, value in pod_template(render(VARIANTS[variant]))["spec"].items()
        if key != "priorityClassName"
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}
    response = installed.call("POST", f"/api/v1/namespaces/{name}/pods", pod, dryRun="All")
    assert response.is_success, response.json()["message"]


def test_the_operator_may_do_its_work(http: httpx.Client, installed: Account, rollout: Object) -> None:
    operator = Account(http, OPERATOR)
    for manifest in all_children(fleet(SPECS["multi-node"], namespace="rl")):
        for response in (operator.apply(manifest), operator.apply(manifest)):
            assert response.is_success, f"{manifest['kind']}: {response.text}"
        collection, _, name = path_of(manifest).rpartition("/")
        assert operator.call("GET", collection, labelSelector="app.kubernetes.io/managed-by=sglang-rollout").is_success
        assert operator.call("DELETE", f"{collection}/{name}").is_success
    status = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "qwen3-8b"}, "status": {"replicas": 1}}
    assert operator.call("PATCH", f"{ROLLOUTS}/qwen3-8b/status", status, APPLY, fieldManager="x").is_success
    for path in (
        "/apis/rollout.sglang.io/v1alpha1/sglangrollouts",
        "/api/v1/pods",
        "/api/v1/events",
        "/openid/v1/jwks",
        "/.well-known/openid-configuration",
    ):
        assert operator.call("GET", path).is_success, path
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "e", "namespace": "rl"},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "c",
        "reportingInstance": "i",
        "action": "a",
        "reason": "r",
        "type": "Normal",
        "regarding": {"kind": KIND, "namespace": "rl", "name": "qwen3-8b"},
    }
    series = {"count": 2, "lastObservedTime": "2026-01-01T00:00:00.000000Z"}
    events = "/apis/events.k8s.io/v1/namespaces/rl/events"
    assert operator.call("POST", events, event).is_success
    assert operator.call("PATCH", f"{events}/e", {"series": series}, MERGE).is_success


def test_the_operator_may_lead_and_make_its_own_tokens(http: httpx.Client, installed: Account) -> None:
    operator = Account(http, OPERATOR)
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": RELEASE}, "spec": {}}
    created = operator.call("POST", leases, lease)
    assert created.is_success, created.text
    assert operator.call("PUT", f"{leases}/{RELEASE}", created.json()).is_success
    token: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": ["a"]}}
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    assert operator.call("POST", f"{accounts}/{RELEASE}/token", token).is_success


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/namespaces/rl/secrets"),
        ("GET", "/api/v1/nodes"),
        ("GET", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/other"),
        ("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/other/token"),
        ("POST", "/api/v1/namespaces/rl/serviceaccounts/trainer/token"),
        ("POST", "/api/v1/namespaces/rl/pods"),
        ("POST", "/api/v1/namespaces/rl/pods/p/exec"),
        ("PATCH", f"{ROLLOUTS}/qwen3-8b"),
        ("DELETE", f"{ROLLOUTS}/qwen3-8b"),
        ("POST", "/apis/rbac.authorization.k8s.io/v1/namespaces/rl/roles"),
    ],
)
def test_the_operator_may_do_nothing_else(http: httpx.Client, installed: Account, method: str, path: str) -> None:
    body: Object | None = None if method == "GET" else {}
    headers = MERGE if method == "PATCH" else None
    assert Account(http, OPERATOR).call(method, path, body, headers).status_code == 403


def _trainer(http: httpx.Client, installed: Account) -> Account:
    """Bound to everything that the resource has: what is refused is refused by the policy."""
    subject: Object = {"kind": "ServiceAccount", "name": "trainer", "namespace": "rl"}
    everything = {"apiGroups": ["rollout.sglang.io"], "resources": ["*"], "verbs": ["*"]}
    names = {"metadata": {"name": "trainer-everything", "namespace": "rl"}}
    rbac: Object = {"apiVersion": "rbac.authorization.k8s.io/v1", **names}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "trainer-everything"}
    bodies: tuple[Object, ...] = (
        {**rbac, "kind": "Role", "rules": [everything]},
        {**rbac, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]},
    )
    for body in bodies:
        assert installed.apply(body).is_success
    return Account(http, TRAINER)


def _forbidden(response: httpx.Response) -> str:
    return str(response.json()["message"]) if response.status_code in (403, 422) else ""


def test_trainers_change_the_runtime_fields_alone(http: httpx.Client, installed: Account, rollout: Object) -> None:
    trainer = _trainer(http, installed)
    mine = f"{ROLLOUTS}/qwen3-8b"

    def change(spec: Object) -> httpx.Response:
        return trainer.call("PATCH", mine, {"spec": spec}, MERGE)

    # Policies reach the API server's admission a moment after they are written.
    eventually(lambda: bool(_forbidden(change({"replicas": 2}))), "the policy does not hold")
    assert "not spec.replicas" in _forbidden(change({"replicas": 2}))
    assert "not spec.engine" in _forbidden(change({"engine": {"image": "other"}}))
    assert "not spec.restart" in _forbidden(change({"restart": {"requestID": "1"}}))
    both = _forbidden(
        change({"engine": {"image": "other"}, "router": {"replicas": 2}, "execution": {"state": "Paused"}})
    )
    assert "spec.engine" in both
    assert "spec.router" in both
    for allowed in (
        {"execution": {"state": "Paused"}},
        {"memory": {"kvCache": "Released"}},
        {"weights": {"version": "2", "source": {"type": "Disk", "disk": {"path": "/models/2"}}}},
        {"weightCheck": {"requestID": "1", "action": "Checksum"}},
        {"profile": {"requestID": "1"}},
        {"flushCache": {"requestID": "1"}},
        {"abortRequests": {"requestID": "1"}},
        {"weightCheck": None, "profile": None},
    ):
        response = change(allowed)
        assert response.is_success, response.text
    whole = trainer.call("PATCH", mine, {"metadata": {"labels": {"step": "7"}}}, MERGE)
    assert whole.is_success, whole.text
    for subresource, body in (("scale", {"spec": {"replicas": 9}}), ("status", {"status": {"replicas": 9}})):
        assert "do not create, scale or report" in _forbidden(
            trainer.call("PATCH", f"{mine}/{subresource}", body, MERGE)
        )
    other = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "other"}, "spec": SPECS["minimal"]}
    assert "do not create" in _forbidden(trainer.call("POST", ROLLOUTS, other))
    # Nobody else is held to this.
    assert installed.call("PATCH", mine, {"spec": {"replicas": 2}}, MERGE).is_success


def test_an_upgrade_and_a_removal_leave_the_crd_and_the_fleets(
    server: ApiServer, installed: Account, rollout: Object
) -> None:
    values = values_arguments({"replicas": 3, "networkPolicy": EVERYTHING["networkPolicy"]})
    helm("upgrade", RELEASE, str(CHART), *values, kubeconfig=server.kubeconfig)
    deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{RELEASE}"
    assert installed.call("GET", deployment).json()["spec"]["replicas"] == 3
    policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    assert installed.call("GET", policies).json()["items"] == []
    helm("uninstall", RELEASE, kubeconfig=server.kubeconfig)
    assert installed.call("GET", deployment).status_code == 404
    assert installed.call("GET", f"{ROLLOUTS}/qwen3-8b").json()["spec"]["replicas"] == 1
    # And the release can come back to them.
    helm("install", RELEASE, str(CHART), kubeconfig=server.kubeconfig)
    assert installed.call("GET", deployment).is_success


def test_a_release_for_some_namespaces_has_rights_in_these_alone(
    server: ApiServer, http: httpx.Client, installed: Account
) -> None:
    values = values_arguments(VARIANTS["namespaced"])
    helm("install", "sglang-rollout-teams", str(CHART), *values, kubeconfig=server.kubeconfig)
    operator = Account(http, f"system:serviceaccount:{NAMESPACE}:sglang-rollout-teams")
    for namespace, status in (("team-a", 200), ("team-b", 200), ("rl", 403)):
        path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
        assert operator.call("GET", path).status_code == status
    assert operator.call("GET", "/api/v1/pods").status_code == 403
