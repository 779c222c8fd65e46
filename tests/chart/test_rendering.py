"""The rendered objects: rights, Pod Security, images, and values that are refused with a message."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from sglang_rollout.api.crd import custom_resource_definition
from sglang_rollout.controller.settings import Settings, from_environment
from tests.chart.rendering import VARIANTS, of_kind, one_of_kind, pod_template, render, template

pytestmark = pytest.mark.apiserver  # Helm is built together with the API server

Object = dict[str, Any]


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Object]]:
    return {name: render(values) for name, values in VARIANTS.items()}


def _settings(pod: Object) -> Settings:
    variables = pod["spec"]["containers"][0]["env"]
    return from_environment({one["name"]: one.get("value", "x") for one in variables})


def test_the_crd_is_kept_and_otherwise_that_of_the_models(rendered: dict[str, list[Object]]) -> None:
    found = one_of_kind(rendered["default"], "CustomResourceDefinition")
    assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    found["metadata"].pop("labels")
    assert found == yaml.safe_load(yaml.safe_dump(custom_resource_definition()))


def test_the_crd_can_be_left_out(rendered: dict[str, list[Object]]) -> None:
    assert not of_kind(rendered["namespaced"], "CustomResourceDefinition")


@pytest.mark.parametrize("variant", VARIANTS)
def test_rights_are_spelled_out_and_hold_no_secrets(rendered: dict[str, list[Object]], variant: str) -> None:
    for kind in ("Role", "ClusterRole"):
        for role in of_kind(rendered[variant], kind):
            for rule in role["rules"]:
                assert "*" not in str(rule)
                assert "secrets" not in rule.get("resources", [])
                assert not {"impersonate", "bind", "escalate"} & set(rule["verbs"])


def test_the_operator_cannot_write_the_resource_itself(rendered: dict[str, list[Object]]) -> None:
    bound = one_of_kind(rendered["default"], "ClusterRoleBinding")["roleRef"]["name"]
    (role,) = [one for one in of_kind(rendered["default"], "ClusterRole") if one["metadata"]["name"] == bound]
    (rule,) = [rule for rule in role["rules"] if "sglangrollouts" in rule.get("resources", [])]
    assert rule["verbs"] == ["get", "list", "watch"]


def test_tokens_are_limited_to_the_operators_own_account(rendered: dict[str, list[Object]]) -> None:
    account = one_of_kind(rendered["default"], "ServiceAccount")["metadata"]["name"]
    rules = [
        rule
        for kind in ("Role", "ClusterRole")
        for role in of_kind(rendered["default"], kind)
        for rule in role["rules"]
        if "serviceaccounts/token" in rule.get("resources", [])
    ]
    assert [rule["resourceNames"] for rule in rules] == [[account]]


def test_with_namespaces_there_are_no_cluster_wide_rights(rendered: dict[str, list[Object]]) -> None:
    objects = rendered["namespaced"]
    assert not of_kind(objects, "ClusterRole")
    assert not of_kind(objects, "ClusterRoleBinding")
    namespaces = sorted(role["metadata"]["namespace"] for role in of_kind(objects, "Role"))
    assert namespaces == ["sglang-rollout-system", "team-a", "team-b"]
    environment = {one["name"]: one.get("value") for one in pod_template(objects)["spec"]["containers"][0]["env"]}
    assert environment["WATCH_NAMESPACES"] == "team-a,team-b"


@pytest.mark.parametrize("variant", VARIANTS)
def test_fleets_network_policies_let_the_operator_in(rendered: dict[str, list[Object]], variant: str) -> None:
    pod = pod_template(rendered[variant])
    assert _settings(pod).pod_labels
    assert _settings(pod).pod_labels.items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_match(rendered: dict[str, list[Object]], variant: str) -> None:
    objects = rendered[variant]
    labels = pod_template(objects)["metadata"]["labels"].items()
    selectors = [
        one_of_kind(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        one_of_kind(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one_of_kind(objects, "Service")["spec"]["selector"],
        *(policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind(objects, "NetworkPolicy")),
    ]
    assert all(selector.items() <= labels for selector in selectors)


def test_the_operator_reads_the_environment_that_the_chart_sets(rendered: dict[str, list[Object]]) -> None:
    settings = _settings(pod_template(rendered["everything"]))
    assert settings.service_account == one_of_kind(rendered["everything"], "ServiceAccount")["metadata"]["name"]
    assert settings.agent_image == "registry.example/team/sglang-rollout/agent:1.2"
    assert settings.router_image == "registry.example/team/sglang-rollout/router:1.2"
    container = pod_template(rendered["everything"])["spec"]["containers"][0]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert settings.credentials_dir in mounts
    assert settings.metrics_port in {port["containerPort"] for port in container["ports"]}
    leases = [
        rule["resourceNames"]
        for role in of_kind(rendered["everything"], "Role")
        for rule in role["rules"]
        if "leases" in rule["resources"] and "resourceNames" in rule
    ]
    assert leases == [[settings.lease_name]]


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ({}, "sglang-rollout/operator:0.1.0"),
        ({"tag": "dev"}, "sglang-rollout/operator:dev"),
        ({"registry": "r.example"}, "r.example/sglang-rollout/operator:0.1.0"),
        ({"registry": "r.example", "operator": "other/op@sha256:0"}, "other/op@sha256:0"),
    ],
)
def test_image_references(images: Object, expected: str) -> None:
    assert pod_template(render({"images": images}))["spec"]["containers"][0]["image"] == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 3}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
        ({"trainerAccounts": ["trainer"]}, "trainerAccounts"),
        ({"routerCredentials": [{"name": "a"}]}, "routerCredentials"),
        ({"logLevel": "chatty"}, "logLevel"),
        ({"metrics": {"serviceMonitor": {"enabled": "yes"}}}, "serviceMonitor"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_wrong_value_is_refused_by_name(values: Object, message: str) -> None:
    result = template(values, check=False)
    assert result.returncode != 0
    assert "values don't meet the specifications of the schema" in result.stderr
    assert message in result.stderr
