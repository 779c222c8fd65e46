"""What the children promise, each in one place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_rollout.protocol.fleet import FleetConfig
from sglang_rollout.protocol.pod import (
    ENV_DRAIN_SECONDS,
    ENV_ROUTER_API_KEY_FILE,
    ENV_SERVED_NAME,
    ENV_STAGE_BUCKET_BYTES,
    ENV_STAGE_MEDIUM,
    ENV_STAGE_VERSIONS,
    FLEET_FILE,
)
from sglang_rollout.protocol.wire import loads
from sglang_rollout.resources import (
    UnusableSpec,
    fleet_children,
    headless_service,
    pod_template_hash,
    stateful_set,
)
from tests.resources.fleets import (
    BOOT,
    CONTEXT,
    SPECS,
    UID,
    all_children,
    containers,
    environment,
    fleet,
    of_kind,
    pod_templates,
)

Spec = dict[str, Any]


def spec(**parts: Any) -> Spec:
    return {**SPECS["minimal"], **parts}


@pytest.mark.parametrize("name", SPECS)
def test_every_child_is_owned_by_the_resource(name: str) -> None:
    for one in all_children(fleet(SPECS[name])):
        (owner,) = one["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (UID, True, True)
        assert one["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "sglang-rollout"
        assert one["metadata"]["labels"]["rollout.sglang.io/fleet"] == "qwen3-8b"


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {"version": "43", "source": {"type": "Disk", "disk": {"path": "/models/step-43"}}}},
        {"execution": {"state": "Paused", "pauseMode": "InPlace"}},
        {"replicas": 7},
        {"staleness": {"maxVersionLag": 3}},
        {"restart": {"requestID": "1"}},
        {"restartPolicy": {"maxRestarts": 1}},
        {"router": {"replicas": 3, "policy": "random"}},
        {"network": {"trainers": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_while_an_engine_runs_is_not_in_its_template(change: Spec) -> None:
    assert stateful_set(fleet(spec(**change)), CONTEXT, 0) == stateful_set(fleet(spec()), CONTEXT, 0)


def test_a_weight_move_changes_the_config_map_alone() -> None:
    before = fleet_children(fleet(spec()), CONTEXT, BOOT)
    moved = type(BOOT)(version="43", path="/models/step-43")
    after = fleet_children(fleet(spec()), CONTEXT, moved)
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert [one["kind"] for one in changed] == ["ConfigMap"]
    config = loads(FleetConfig, changed[0]["data"][FLEET_FILE])
    assert (config.boot, config.uid, config.trust) == (moved, UID, CONTEXT.trust)


def test_the_config_map_is_the_same_whatever_the_order_of_its_keys() -> None:
    text = of_kind(all_children(fleet(spec())), "ConfigMap")["data"][FLEET_FILE]
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1)


def test_pods_hold_no_token() -> None:
    children = all_children(fleet(spec()))
    accounts = [one for one in children if one["kind"] == "ServiceAccount"]
    assert [one["automountServiceAccountToken"] for one in accounts] == [False, False]
    assert [template["spec"]["automountServiceAccountToken"] for template in pod_templates(children)] == [False, False]
    names = {template["spec"]["serviceAccountName"] for template in pod_templates(children)}
    assert names == {one["metadata"]["name"] for one in accounts}


def test_engine_and_agent_share_image_memory_and_model() -> None:
    template = of_kind(all_children(fleet(SPECS["multi-node"])), "StatefulSet")["spec"]["template"]
    agent, engine = containers(template)["agent"], containers(template)["engine"]
    assert agent["image"] == engine["image"]
    assert agent["restartPolicy"] == "Always"
    shared = {"/dev/shm", "/models", "/run/sglang-rollout", "/sglang-rollout"}
    for container in (agent, engine):
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert shared <= mounts.keys()
        assert mounts["/models"]["readOnly"] is True
    memory = {one["name"] for one in template["spec"]["volumes"] if one.get("emptyDir", {}).get("medium") == "Memory"}
    assert memory == {"rollout-run", "rollout-shm", "rollout-state"}


@pytest.mark.parametrize(("medium", "program"), [("Host", "agent"), ("Device", "agent.supervisor"), ("None", "agent")])
def test_an_agent_whose_stage_is_in_gpu_memory_is_started_again_in_place(medium: str, program: str) -> None:
    staging = {"medium": medium, "versions": 2, "bucketSize": "1Gi"}
    written = spec(agent={"staging": staging, "gpuAccess": {"type": "VisibleDevices"}})
    template = of_kind(all_children(fleet(written)), "StatefulSet")["spec"]["template"]
    assert containers(template)["agent"]["command"] == ["python3", "-m", f"sglang_rollout.{program}"]
    for container in (containers(template)["agent"], containers(template)["engine"]):
        told = environment(container)
        assert told[ENV_STAGE_MEDIUM] == medium
        assert (told[ENV_STAGE_VERSIONS], told[ENV_STAGE_BUCKET_BYTES]) == ("2", str(1 << 30))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, ["--tp-size=1"]),
        ({"tensorParallelSize": 8, "pipelineParallelSize": 2}, ["--tp-size=8", "--pp-size=2"]),
        (
            {
                "tensorParallelSize": 8,
                "dataParallelSize": 4,
                "expertParallelSize": 8,
                "args": ["--enable-dp-attention"],
            },
            ["--tp-size=8", "--dp-size=4", "--ep-size=8", "--enable-dp-attention"],
        ),
    ],
)
def test_engine_arguments(parts: Spec, expected: list[str]) -> None:
    rollout = fleet(spec(engine={"image": "i", **parts}))
    stateful_set = of_kind(all_children(rollout), "StatefulSet")
    assert containers(stateful_set["spec"]["template"])["engine"]["args"] == expected


@pytest.mark.parametrize(
    ("model", "expected"), [({"path": "/m/a"}, "/m/a"), ({"path": "/m/a", "servedName": "qwen"}, "qwen")]
)
def test_the_served_name_reaches_the_pod(model: Spec, expected: str) -> None:
    stateful_set = of_kind(all_children(fleet(spec(model=model))), "StatefulSet")
    engine = containers(stateful_set["spec"]["template"])["engine"]
    assert environment(engine)[ENV_SERVED_NAME] == expected


def test_the_drain_follows_the_grace_period_of_the_overlay() -> None:
    engine, router = pod_templates(list(reversed(all_children(fleet(SPECS["overlay"])))))
    assert environment(containers(engine)["engine"])[ENV_DRAIN_SECONDS] == "585"
    assert environment(containers(engine)["agent"])[ENV_DRAIN_SECONDS] == "585"
    assert environment(containers(router)["router"])[ENV_DRAIN_SECONDS] == "110"


def test_the_client_key_is_a_file_and_only_the_router_sees_it() -> None:
    deployment = of_kind(all_children(fleet(SPECS["multi-node"])), "Deployment")
    parts = containers(deployment["spec"]["template"])
    path = environment(parts["router"])[ENV_ROUTER_API_KEY_FILE]
    (mount,) = [one for one in parts["router"]["volumeMounts"] if path.startswith(one["mountPath"] + "/")]
    (volume,) = [one for one in deployment["spec"]["template"]["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == "qwen3-router"
    assert volume["secret"]["items"] == [{"key": "token", "path": path.rsplit("/", 1)[1]}]
    assert ENV_ROUTER_API_KEY_FILE not in environment(parts["sidecar"])
    assert mount["name"] not in {one["name"] for one in parts["sidecar"]["volumeMounts"]}


@pytest.mark.parametrize(("replicas", "expected"), [(0, 1), (1, 1), (2, 2)])
def test_routers_have_a_budget_when_there_are_several(replicas: int, expected: int) -> None:
    children = fleet_children(fleet(spec(router={"replicas": replicas})), CONTEXT, BOOT)
    assert sum(one["kind"] == "PodDisruptionBudget" for one in children) == expected


def test_an_external_router_leaves_no_router_of_ours() -> None:
    children = all_children(fleet(SPECS["external-router"]))
    assert not [one for one in children if "router" in one["metadata"]["name"]]
    ports = [rule for rule in of_kind(children, "NetworkPolicy")["spec"]["ingress"] if "from" not in rule]
    assert ports == [{"ports": [{"protocol": "TCP", "port": 30000}]}]


def test_the_budget_counts_every_pod_of_every_engine() -> None:
    children = all_children(fleet(SPECS["multi-node"]), engines=2)
    budget = of_kind(children, "PodDisruptionBudget", "qwen3-8b-engines")["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    selector = budget["selector"]["matchLabels"].items()
    sets = [one for one in children if one["kind"] == "StatefulSet"]
    assert all(selector <= one["spec"]["template"]["metadata"]["labels"].items() for one in sets)


def test_network_policies_open_what_is_needed() -> None:
    children = all_children(fleet(SPECS["multi-node"]))
    engine = of_kind(children, "NetworkPolicy", "qwen3-8b-engine")["spec"]["ingress"]
    router = of_kind(children, "NetworkPolicy", "qwen3-8b-router")["spec"]["ingress"]

    def ports(rule: dict[str, Any]) -> set[int]:
        return {port["port"] for port in rule.get("ports", [])}

    def component(rule: dict[str, Any]) -> str:
        return str(rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"])

    assert [(component(rule), ports(rule)) for rule in engine[:3]] == [
        ("router", {30000}),
        ("operator", {30001}),
        ("engine", set()),
    ]
    assert engine[3]["from"][1] == {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
    assert ports(engine[3]) == set(), "NCCL and Gloo choose their ports"
    assert [("from" in rule, ports(rule)) for rule in router] == [(False, {30000, 29000}), (True, {30002})]
    operator = router[1]["from"][0]["namespaceSelector"]["matchLabels"]
    assert operator == {"kubernetes.io/metadata.name": "sglang-rollout-system"}


def test_trainers_are_known_by_the_users_of_their_tokens() -> None:
    accounts = [{"name": "trainer"}, {"name": "ppo", "namespace": "research"}]
    config = of_kind(all_children(fleet(spec(network={"trainerAccounts": accounts}))), "ConfigMap")
    trust = json.loads(config["data"][FLEET_FILE])["trust"]
    assert trust["trainers"] == ["system:serviceaccount:rl:trainer", "system:serviceaccount:research:ppo"]
    assert not set(trust["trainers"]) & set(trust["callers"])


def test_the_headless_service_answers_before_pods_are_ready() -> None:
    service = headless_service(fleet(spec()), 3)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"]["rollout.sglang.io/engine"] == "3"


def test_the_agents_of_gpu_images_take_no_gpu() -> None:
    stateful_set = of_kind(all_children(fleet(spec())), "StatefulSet")
    parts = containers(stateful_set["spec"]["template"])
    assert environment(parts["agent"])["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "NVIDIA_VISIBLE_DEVICES" not in environment(parts["engine"])


@pytest.mark.parametrize(("access", "visible"), [("VisibleDevices", "all"), ("ResourceClaim", None)])
def test_an_agent_that_is_to_reach_the_gpus_does(access: str, visible: str | None) -> None:
    agent = {"gpuAccess": {"type": access}, "resources": {"claims": [{"name": "gpus"}]}}
    template = of_kind(all_children(fleet(spec(agent=agent))), "StatefulSet")["spec"]["template"]
    part = containers(template)["agent"]
    assert environment(part).get("NVIDIA_VISIBLE_DEVICES") == visible
    assert part["resources"]["claims"] == [{"name": "gpus"}]
    assert template["spec"]["shareProcessNamespace"] is True


@pytest.mark.parametrize("name", ["ROLLOUT_RANK", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"])
def test_the_user_cannot_set_our_environment(name: str) -> None:
    rollout = fleet(spec(engine={"image": "i", "env": [{"name": name, "value": "1"}]}))
    with pytest.raises(UnusableSpec, match=f"engine.env: {name} belongs to the operator"):
        stateful_set(rollout, CONTEXT, 0)


def test_the_template_hash_does_not_depend_on_the_order_of_keys() -> None:
    template = of_kind(all_children(fleet(SPECS["overlay"])), "StatefulSet")["spec"]["template"]
    shuffled = {key: template[key] for key in reversed(list(template))}
    assert pod_template_hash(shuffled) == pod_template_hash(template)
    assert pod_template_hash({**template, "spec": {}}) != pod_template_hash(template)
