"""What holds for every fleet: names, selectors, and that no overlay reaches what is the operator's."""

from __future__ import annotations

import copy
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sglang_rollout.api import SGLangRollout
from sglang_rollout.resources import Manifest, UnusableSpec
from tests.resources.fleets import SPECS, all_children, containers, fleet, pod_templates

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

fleet_names = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
paths = st.sampled_from(["/models/a", "/m", "Qwen/Qwen3-8B"])

specs: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"path": paths},
            optional={
                "servedName": st.just("m"),
                "volume": st.sampled_from([{"emptyDir": {}}, {"persistentVolumeClaim": {"claimName": "c"}}]),
                "mountPath": st.sampled_from(["/models", "/data"]),
            },
        ),
        "engine": st.fixed_dictionaries(
            {"image": st.just("engine:1")},
            optional={
                "nodes": st.sampled_from([1, 2, 16]),
                "tensorParallelSize": st.sampled_from([1, 16, 64]),
                "sharedMemorySize": st.sampled_from(["1Gi", 1073741824]),
                "env": st.lists(
                    st.fixed_dictionaries(
                        {"name": st.from_regex(r"[A-Z]{1,8}", fullmatch=True), "value": st.text(max_size=5)}
                    ),
                    unique_by=lambda variable: variable["name"],
                    max_size=4,
                ),
            },
        ),
    },
    optional={
        "router": st.sampled_from(
            [{"replicas": 3}, {"external": {"url": "http://r"}}, {"auth": {"secretKeyRef": {"name": "s", "key": "k"}}}]
        ),
        "network": st.sampled_from([{"hostNetwork": True}, {"trainers": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]),
        "scheduling": st.just({"schedulerName": "volcano"}),
    },
)
fleets = st.builds(fleet, specs, fleet_names)


@given(fleets, st.sampled_from([0, 9, 1999]))
def test_names_are_valid_and_not_used_twice(rollout: SGLangRollout, index: int) -> None:
    children = all_children(rollout, index % 10 + 1)
    keys = [(one["kind"], one["metadata"]["name"]) for one in children]
    assert len(set(keys)) == len(keys)
    for kind, name in keys:
        assert (SERVICE_NAME if kind == "Service" else DNS_LABEL).fullmatch(name), (kind, name)
        # The pods of a StatefulSet carry a revision label, <name>-<ten characters>.
        assert kind != "StatefulSet" or len(name) <= 52
    for one in children:
        assert all(LABEL_VALUE.fullmatch(value) for value in one["metadata"]["labels"].values())


@given(fleets)
def test_selectors_match_the_pods_that_they_are_for(rollout: SGLangRollout) -> None:
    children = all_children(rollout, engines=2)
    pods = [template["metadata"]["labels"] for template in pod_templates(children)]
    for one in children:
        if one["kind"] in ("StatefulSet", "Deployment"):
            selector = one["spec"]["selector"]["matchLabels"]
            assert selector.items() <= one["spec"]["template"]["metadata"]["labels"].items()
            assert sum(selector.items() <= labels.items() for labels in pods) == 1
        elif one["kind"] in ("PodDisruptionBudget", "NetworkPolicy", "Service"):
            spec = one["spec"]
            selector = dict(
                spec["selector"]
                if one["kind"] == "Service"
                else spec.get("podSelector", spec.get("selector"))["matchLabels"]
            )
            selector.pop("apps.kubernetes.io/pod-index", None)  # set by Kubernetes
            assert any(selector.items() <= labels.items() for labels in pods)


@given(fleets)
def test_pods_name_nothing_twice_and_mount_only_what_is_there(rollout: SGLangRollout) -> None:
    for template in pod_templates(all_children(rollout)):
        _check_pod(template)


def _check_pod(template: Manifest) -> None:
    volumes = [volume["name"] for volume in template["spec"]["volumes"]]
    assert len(set(volumes)) == len(volumes)
    for container in containers(template).values():
        variables = [variable["name"] for variable in container.get("env", [])]
        assert len(set(variables)) == len(variables)
        mounts = container.get("volumeMounts", [])
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        assert {mount["name"] for mount in mounts} <= set(volumes)
        ports = [port["name"] for port in container.get("ports", [])]
        assert len(set(ports)) == len(ports)
    assert _nulls(template) == []


def _nulls(value: Any, path: str = "") -> list[str]:
    if value is None:
        return [path]
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in entries for found in _nulls(inner, f"{path}.{key}")]


# Overlays of a user who means harm: fields of ours, entries with our names, entries of theirs, and rubbish.
_values = st.sampled_from([None, True, "x", 1, [], {}, ["sh"], {"httpGet": {"path": "/", "port": 1}}, [{"name": "x"}]])
_OWNED_CONTAINER = (
    "image",
    "command",
    "args",
    "ports",
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "lifecycle",
    "restartPolicy",
)
_container_fields = st.dictionaries(
    st.sampled_from([*_OWNED_CONTAINER, "env", "volumeMounts", "securityContext", "resources", "workingDir"]),
    _values,
    max_size=2,
)
_containers = st.lists(
    st.builds(
        lambda name, fields, env, mounts: {**fields, "name": name, **env, **mounts},
        st.sampled_from(["engine", "agent", "inject", "mine"]),
        _container_fields,
        st.sampled_from(
            [{}, {"env": [{"name": "ROLLOUT_RANK", "value": "9"}]}, {"env": [{"name": "MINE", "value": "9"}]}]
        ),
        st.sampled_from([{}, {"volumeMounts": [{"name": "x", "mountPath": "/sglang-rollout"}]}]),
    ),
    unique_by=lambda container: container["name"],
    max_size=3,
)
_pod_specs = st.fixed_dictionaries(
    {},
    optional={
        "containers": _containers,
        "initContainers": _containers,
        "volumes": st.sampled_from(["x", [1], [{"name": "rollout-run"}], [{"name": "x", "emptyDir": {}}]]),
        "restartPolicy": st.just("Never"),
        "hostNetwork": st.just(True),
        "automountServiceAccountToken": st.just(True),
        "tolerations": st.just([{"operator": "Exists"}]),
        "nodeSelector": st.just({"a": "b"}),
        "terminationGracePeriodSeconds": st.sampled_from([0, 5, 3600, "60"]),
    },
)
_labels = st.dictionaries(
    st.sampled_from(["team", "rollout.sglang.io/fleet", "rollout.sglang.io/engine", "app.kubernetes.io/component"]),
    st.just("other"),
    max_size=2,
)
overlays = st.fixed_dictionaries(
    {}, optional={"spec": _pod_specs, "metadata": st.builds(lambda labels: {"labels": labels}, _labels)}
)

_OWNED_POD = ("restartPolicy", "hostNetwork", "automountServiceAccountToken", "hostname", "subdomain", "schedulerName")


def _owned(template: Manifest) -> dict[str, Any]:
    """The parts of a template that no overlay may change."""
    parts = containers(template)
    return copy.deepcopy(
        {
            "labels": {key: value for key, value in template["metadata"]["labels"].items() if key != "team"},
            "pod": {name: template["spec"].get(name) for name in _OWNED_POD},
            "volumes": [one for one in template["spec"]["volumes"] if one["name"].startswith("rollout-")],
            "containers": {
                name: {
                    **{field: parts[name].get(field) for field in _OWNED_CONTAINER},
                    "env": [
                        one
                        for one in parts[name].get("env", [])
                        if one["name"].startswith("ROLLOUT_") and one["name"] != "ROLLOUT_DRAIN_SECONDS"
                    ],
                    "mounts": [one for one in parts[name]["volumeMounts"] if one["name"].startswith("rollout-")],
                }
                for name in ("inject", "agent", "engine")
            },
        }
    )


@given(overlays)
def test_an_overlay_is_refused_or_leaves_alone_what_is_ours(overlay: dict[str, Any]) -> None:
    minimal = SPECS["minimal"]
    plain, *_ = pod_templates(all_children(fleet({**minimal, "router": {"external": {"url": "http://r"}}})))
    spec = {
        **minimal,
        "engine": {**minimal["engine"], "template": overlay},
        "router": {"external": {"url": "http://r"}},
    }
    try:
        rollout = fleet(spec)
        template, *_ = pod_templates(all_children(rollout))
    except ValidationError:
        return  # of no valid form: the API server refuses it, too
    except UnusableSpec:
        return
    assert _owned(template) == _owned(plain)
