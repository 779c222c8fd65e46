"""What a real API server makes of the CRD: defaults, pruning, scale, columns, descriptions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from sglang_rollout.api import ConditionType, EngineStatus, SGLangRollout, Status, WeightsStatus, with_condition
from sglang_rollout.api.status import RouterStatus, WeightTransaction
from tests.api.objects import Object, merged, rollout
from tests.api.resource_api import ResourceApi

pytestmark = pytest.mark.apiserver
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

OPTIONAL_PARTS: Object = {
    "model": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "engine": {
        "env": [{"name": "A", "value": "b"}, {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"limits": {"nvidia.com/gpu": 8, "cpu": "500m"}},
        "template": {
            "metadata": {"labels": {"team": "rl"}},
            "spec": {
                "nodeSelector": {"gpu": "h200"},
                "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
                "containers": [{"name": "engine", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}],
            },
        },
    },
    "router": {"auth": {"secretKeyRef": {"name": "router", "key": "api-key"}}},
    "weights": {
        "version": "1",
        "source": {"type": "Distributed", "distributed": {"senders": [{"address": "10.0.0.7", "port": 29600}]}},
        "prepare": {"version": "2", "source": {"type": "Disk", "disk": {"path": "/models/2"}}},
    },
    "weightCheck": {"requestID": "7", "action": "Compare"},
    "profile": {"requestID": "2"},
    "flushCache": {"requestID": "3"},
    "abortRequests": {"requestID": "4"},
    "restart": {"requestID": "1"},
    "network": {"trainers": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]},
}


def status() -> Status:
    conditions = with_condition(
        (), ConditionType.READY, True, "FleetReady", "2 of 2 engines serve 1.", generation=1, now=NOW
    )
    weights = WeightsStatus(version="1", target_version="2", transaction=WeightTransaction(id="t", version="2"))
    return Status(
        observed_generation=1,
        replicas=2,
        ready_replicas=2,
        routable_replicas=1,
        selector="rollout.sglang.io/fleet=fleet",
        execution_state="Running",
        weights=weights.with_committed("1", "/models/1", NOW),
        engines=(EngineStatus(name="fleet-e0", pod_uids=("u",)), EngineStatus(name="fleet-e1")),
        router=RouterStatus(url="http://fleet-router.default:30000"),
        conditions=conditions,
    )


@pytest.fixture
def fleet(resources: ResourceApi) -> Any:
    created = resources.create(rollout("fleet"))
    assert created.is_success, created.json()["message"]
    yield created.json()
    resources.delete("fleet")


@pytest.mark.parametrize("spec", [{}, OPTIONAL_PARTS], ids=["minimal", "optional-parts"])
def test_server_and_models_fill_in_the_same_defaults(spec: Object, resources: ResourceApi) -> None:
    written = rollout(**spec)

    response = resources.create(written, dry_run=True)

    assert response.is_success, response.json()["message"]
    filled_in = response.json()["spec"]
    assert filled_in == SGLangRollout.from_object(written).to_object()["spec"]
    assert SGLangRollout.from_object(response.json()).spec == SGLangRollout.from_object(written).spec


def test_unknown_fields_are_refused_by_strict_validation(resources: ResourceApi) -> None:
    response = resources.create(rollout(engine={"tensorParalelSize": 2}), dry_run=True)

    assert response.status_code == 400
    assert 'unknown field "spec.engine.tensorParalelSize"' in response.json()["message"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"replicas": -1}, "spec.replicas"),
        ({"replicas": 1001}, "spec.replicas"),
        ({"engine": {"nodes": 0}}, "spec.engine.nodes"),
        ({"engine": {"image": None}}, "spec.engine.image"),
        ({"model": {"path": None}}, "spec.model.path"),
        ({"model": {"path": "--evil"}}, "spec.model.path"),
        ({"model": {"mountPath": "models"}}, "spec.model.mountPath"),
        ({"engine": {"resources": {"limits": {"cpu": "many"}}}}, "spec.engine.resources.limits.cpu"),
        ({"engine": {"sharedMemorySize": "16 gigabytes"}}, "spec.engine.sharedMemorySize"),
        ({"engine": {"args": ["x"] * 129}}, "spec.engine.args"),
        ({"execution": {"state": "Stopped"}}, "spec.execution.state"),
        ({"weights": {"version": ""}}, "spec.weights.version"),
        ({"weights": {"version": " 1"}}, "spec.weights.version"),
        ({"weights": {"version": 42}}, "spec.weights.version"),
        ({"weights": {"version": "1", "source": {"type": "Disk", "disk": {"path": "x"}}}}, "spec.weights.source.disk"),
        ({"weights": {"version": "1", "source": {"disk": {"path": "/x"}}}}, "spec.weights.source.type"),
        ({"router": {"policy": "fastest"}}, "spec.router.policy"),
        ({"router": {"external": {"url": "router.example"}}}, "spec.router.external.url"),
        ({"weightCheck": {"action": "Compare"}}, "spec.weightCheck.requestID"),
        ({"staleness": {"maxVersionLag": -1}}, "spec.staleness.maxVersionLag"),
        ({"agent": {"staging": {"versions": 3}}}, "spec.agent.staging.versions"),
        ({"engine": {"env": [{"name": "A"}, {"name": "A"}]}}, "spec.engine.env"),
    ],
)
def test_out_of_bounds_is_refused_by_field(spec: Object, field: str, resources: ResourceApi) -> None:
    response = resources.create(rollout(**spec), dry_run=True)

    assert response.status_code == 422, response.text
    assert field in response.json()["message"]


def test_rules_are_cheap_enough_for_the_largest_resource(resources: ResourceApi) -> None:
    """The API server gives up on rules that cost too much, however valid the resource."""
    argument = "--json-model-override-args=" + "x" * 4000
    labels = {f"example.com/label-{number}": "x" * 63 for number in range(64)}
    containers = [{"name": f"c-{number}", "image": "i"} for number in range(16)]
    template = {"metadata": {"labels": labels}, "spec": {"containers": containers, "initContainers": containers}}
    largest = rollout(
        engine={"args": [argument] * 128, "template": template},
        router={"args": ["--log-level=" + "x" * 4000] * 64, "template": template},
    )

    response = resources.create(largest, dry_run=True)

    assert response.is_success, response.json()["message"]


def test_status_is_kept_as_written_and_unknown_fields_are_pruned(resources: ResourceApi, fleet: Object) -> None:
    written = status().to_object()
    body = {**_identity(fleet), "status": merged(written, {"surprise": 1})}

    response = resources.apply({**body, "status": written}, subresource="status", manager="operator")
    assert response.is_success, response.json()["message"]
    patched = resources.patch("fleet", {"status": {"surprise": 1}}, subresource="status")

    assert patched.json()["status"] == written
    assert SGLangRollout.from_object(patched.json()).status == status()


def test_status_changes_neither_spec_nor_generation(resources: ResourceApi, fleet: Object) -> None:
    body = {**_identity(fleet), "spec": {"replicas": 7}, "status": {"replicas": 2}}

    response = resources.patch("fleet", body, subresource="status")

    assert response.json()["spec"]["replicas"] == 1
    assert response.json()["metadata"]["generation"] == 1


def test_scale_reads_and_writes_engines(resources: ResourceApi, fleet: Object) -> None:
    resources.patch("fleet", {"status": status().to_object()}, subresource="status")

    scale = resources.get("fleet", subresource="scale").json()
    scaled = resources.patch("fleet", {"spec": {"replicas": 3}}, subresource="scale")

    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 2, "selector": "rollout.sglang.io/fleet=fleet"}
    assert scaled.is_success
    assert resources.get("fleet").json()["spec"]["replicas"] == 3


def test_columns(resources: ResourceApi, fleet: Object) -> None:
    resources.patch("fleet", {"status": status().to_object()}, subresource="status")

    table = resources.table()

    columns = {column["name"]: column["priority"] for column in table["columnDefinitions"]}
    narrow = ["Name", "Engines", "Ready", "Routable", "State", "Weights", "Status", "Age"]
    assert [name for name, priority in columns.items() if priority == 0] == narrow
    assert [name for name, priority in columns.items() if priority == 1] == ["Target", "Reason"]
    (cells,) = (row["cells"] for row in table["rows"] if row["cells"][0] == "fleet")
    row = dict(zip(columns, cells, strict=True))
    assert row | {"Age": ""} == {
        "Name": "fleet",
        "Engines": 2,
        "Ready": 2,
        "Routable": 1,
        "State": "Running",
        "Weights": "1",
        "Target": "2",
        "Status": "True",
        "Reason": "FleetReady",
        "Age": "",
    }


def test_short_name_and_scope_are_served(resources: ResourceApi) -> None:
    served = resources.http.get("/apis/rollout.sglang.io/v1alpha1").json()["resources"]

    main = next(resource for resource in served if resource["name"] == "sglangrollouts")
    assert main["shortNames"] == ["sgr"]
    assert main["namespaced"]
    assert {resource["name"] for resource in served} == {
        "sglangrollouts",
        "sglangrollouts/status",
        "sglangrollouts/scale",
    }


def test_explain_describes_every_field(resources: ResourceApi) -> None:
    schemas = resources.openapi()["components"]["schemas"]
    resource = next(schema for name, schema in schemas.items() if name.endswith(".SGLangRollout"))

    missing = [
        path
        for part in ("spec", "status")
        for path, schema in _fields(resource["properties"][part], part)
        if not schema.get("description", "").endswith((".", ")"))
    ]

    assert missing == []


def test_two_owners_apply_env_and_conditions_side_by_side(resources: ResourceApi, fleet: Object) -> None:
    for manager, variable in (("gitops", "A"), ("trainer", "B")):
        body = {**_identity(fleet), "spec": {"engine": {"env": [{"name": variable, "value": manager}]}}}
        response = resources.apply(body, manager=manager)
        assert response.is_success, response.json()["message"]

    env = resources.get("fleet").json()["spec"]["engine"]["env"]

    assert {variable["name"]: variable["value"] for variable in env} == {"A": "gitops", "B": "trainer"}


def test_gitops_takes_the_source_back_from_a_trainer(resources: ResourceApi, fleet: Object) -> None:
    sent = {"type": "Distributed", "distributed": {"senders": [{"address": "10.0.0.7", "port": 29600}]}}
    resources.patch("fleet", {"spec": {"weights": {"version": "2", "source": sent}}})
    source = {"type": "Disk", "disk": {"path": "/models/step-1"}}
    body = {**_identity(fleet), "spec": {"weights": {"version": "1", "source": source}}}

    response = resources.apply(body, manager="gitops", force=True)

    assert response.is_success, response.json()["message"]
    assert response.json()["spec"]["weights"]["source"] == source


def _identity(body: Object) -> Object:
    metadata = {"name": body["metadata"]["name"], "namespace": "default"}
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata}


def _fields(schema: Object, path: str) -> list[tuple[str, Object]]:
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += _fields(child, f"{path}.{name}")
    for name, child in schema.get("items", {}).get("properties", {}).items():
        found += _fields(child, f"{path}[].{name}")
    return found
