"""Laying a user's pod overlay over a rendered template: what is merged, and what is refused in which words."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sglang_rollout.api.overlay import PodOverlay
from sglang_rollout.resources import UnusableSpec
from sglang_rollout.resources.overlay import MERGE_KEYS, merged

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"rollout.sglang.io/fleet": "a"}, "annotations": {"ours": "1"}},
    "spec": {
        "restartPolicy": "Always",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": [{"key": "not-ready", "effect": "NoExecute", "tolerationSeconds": 30}],
        "volumes": [{"name": "rollout-run", "emptyDir": {}}],
        "initContainers": [{"name": "agent", "image": "i", "env": [{"name": "PYTHONPATH", "value": "/p"}]}],
        "containers": [
            {
                "name": "engine",
                "image": "i",
                "command": ["launcher"],
                "env": [{"name": "ROLLOUT_RANK", "value": "0"}, {"name": "A", "value": "1"}],
                "volumeMounts": [{"name": "rollout-run", "mountPath": "/run/sglang-rollout"}],
            }
        ],
    },
}


def overlaid(overlay: dict[str, Any]) -> dict[str, Any]:
    return merged(copy.deepcopy(TEMPLATE), PodOverlay.from_object(overlay), "engine.template")


def test_an_empty_overlay_changes_nothing() -> None:
    assert overlaid({}) == TEMPLATE


def test_arguments_are_not_changed() -> None:
    template = copy.deepcopy(TEMPLATE)
    overlay = PodOverlay.from_object({"spec": {"containers": [{"name": "engine", "env": [{"name": "B"}]}]}})
    merged(template, overlay, "engine.template")
    assert template == TEMPLATE


def test_maps_merge_by_key() -> None:
    result = overlaid({"metadata": {"labels": {"team": "rl"}}, "spec": {"securityContext": {"fsGroup": 1}}})
    assert result["metadata"]["labels"] == {"rollout.sglang.io/fleet": "a", "team": "rl"}
    assert result["spec"]["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 1}


def test_containers_merge_by_name_and_new_ones_come_last() -> None:
    env = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, {"name": "B", "value": "2"}]
    overlay = {"spec": {"containers": [{"name": "logs", "image": "busybox"}, {"name": "engine", "env": env}]}}
    engine, logs = overlaid(overlay)["spec"]["containers"]
    assert logs == {"name": "logs", "image": "busybox"}
    assert engine["command"] == ["launcher"]
    # A variable is replaced whole: one with both value and valueFrom is refused by Kubernetes.
    assert engine["env"] == [{"name": "ROLLOUT_RANK", "value": "0"}, *env]


def test_a_toleration_of_the_same_taint_replaces_ours() -> None:
    theirs = [{"key": "not-ready", "effect": "NoExecute", "tolerationSeconds": 5}, {"key": "gpu", "operator": "Exists"}]
    assert overlaid({"spec": {"tolerations": theirs}})["spec"]["tolerations"] == theirs


def test_lists_without_names_are_replaced() -> None:
    overlay = {"spec": {"dnsConfig": {"searches": ["a"]}, "containers": [{"name": "engine", "x": {"drop": ["ALL"]}}]}}
    result = overlaid(overlay)["spec"]
    assert result["dnsConfig"] == {"searches": ["a"]}
    assert result["containers"][0]["x"] == {"drop": ["ALL"]}


def test_null_means_absent() -> None:
    result = overlaid({"spec": {"affinity": None, "nodeSelector": {"a": None, "b": "c"}}})["spec"]
    assert "affinity" not in result
    assert result["nodeSelector"] == {"b": "c"}


REFUSED = [
    ({"metadata": {"labels": {"rollout.sglang.io/fleet": "b"}}}, "metadata.labels: rollout.sglang.io/fleet belongs"),
    ({"metadata": {"labels": {"app.kubernetes.io/component": "b"}}}, "app.kubernetes.io/component belongs"),
    ({"metadata": {"annotations": {"rollout.sglang.io/spec-hash": "b"}}}, "rollout.sglang.io/spec-hash belongs"),
    ({"spec": {"hostNetwork": True}}, "spec.hostNetwork belongs to the operator: use network.hostNetwork"),
    ({"spec": {"restartPolicy": "Never"}}, "spec.restartPolicy belongs to the operator"),
    ({"spec": {"automountServiceAccountToken": True}}, "mount a projected volume"),
    ({"spec": {"nodeName": "n1"}}, "use nodeSelector or affinity"),
    ({"spec": {"volumes": [{"name": "rollout-run"}]}}, "spec.volumes: rollout-run belongs to the operator"),
    ({"spec": {"containers": [{"name": "engine", "command": ["sh"]}]}}, r"containers\[engine\].command belongs"),
    ({"spec": {"containers": [{"name": "engine", "image": "x"}]}}, "use engine.image"),
    (
        {"spec": {"containers": [{"name": "engine", "env": [{"name": "ROLLOUT_NEW", "value": "1"}]}]}},
        "env: ROLLOUT_NEW belongs to the operator",
    ),
    (
        {"spec": {"initContainers": [{"name": "agent", "env": [{"name": "PYTHONPATH", "value": "/x"}]}]}},
        "env: PYTHONPATH belongs to the operator",
    ),
    (
        {
            "spec": {
                "containers": [{"name": "engine", "volumeMounts": [{"name": "x", "mountPath": "/run/sglang-rollout"}]}]
            }
        },
        "volumeMounts: /run/sglang-rollout belongs to the operator",
    ),
    ({"spec": {"containers": [{"name": "agent"}]}}, "agent is the operator's, and is one of initContainers"),
    ({"spec": {"volumes": "none"}}, "spec.volumes must be a list of objects, each with name"),
    ({"spec": {"volumes": [7]}}, "spec.volumes must be a list of objects, each with name"),
    ({"spec": {"tolerations": {"key": "a"}}}, "spec.tolerations must be a list of objects"),
    ({"spec": {"tolerations": [{"key": {}}]}}, "spec.tolerations must be a list of objects, each with key and effect"),
    ({"spec": {"containers": [{"name": "engine", "env": [{"value": "1"}]}]}}, "env must be a list of objects"),
]


ENTRY: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(sorted({key for keys in MERGE_KEYS.values() for key in keys})),
    st.none() | st.integers() | st.just("engine") | st.just([]) | st.just({}),
)


@given(st.dictionaries(st.sampled_from(sorted(MERGE_KEYS)), ENTRY | st.lists(ENTRY, max_size=2), max_size=2))
def test_entries_of_any_form_are_merged_or_refused(lists: dict[str, Any]) -> None:
    try:
        overlay = PodOverlay.from_object({"spec": lists})
    except ValidationError:
        return  # as the API server refuses it
    with contextlib.suppress(UnusableSpec):
        merged(copy.deepcopy(TEMPLATE), overlay, "engine.template")


@pytest.mark.parametrize(("overlay", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_ours_is_refused_with_a_sentence(overlay: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableSpec, match=f"engine.template.*{message}"):
        overlaid(overlay)
