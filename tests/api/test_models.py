"""The models as Python: names, leniency, immutability."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sglang_rollout.api import SGLangRollout, Spec
from sglang_rollout.api.schema import field_alias
from tests.api.objects import merged, rollout


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("replicas", "replicas"),
        ("tensor_parallel_size", "tensorParallelSize"),
        ("request_id", "requestID"),
        ("pod_uids", "podUIDs"),
        ("start_id", "startID"),
        ("kv_cache", "kvCache"),
        ("except_", "except"),
    ],
)
def test_json_names(name: str, alias: str) -> None:
    assert field_alias(name) == alias


def test_fields_of_a_newer_crd_are_ignored() -> None:
    newer = merged(rollout(engine={"quantum": True}, later={"a": 1}), {"status": {"moods": ["good"]}})

    assert SGLangRollout.from_object(newer) == SGLangRollout.from_object(rollout())


def test_overlay_keeps_fields_that_it_does_not_know() -> None:
    pod = {
        "nodeSelector": {"gpu": "h200"},
        "containers": [{"name": "engine", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [{"name": "v", "emptyDir": {}}],
    }

    template = Spec.from_object(rollout(engine={"template": {"spec": pod}})["spec"]).engine.template

    assert template.to_object() == {"spec": pod}


def test_volume_and_value_from_are_passed_on_unchanged() -> None:
    volume = {"csi": {"driver": "d", "readOnly": True, "volumeAttributes": {"a": "b"}}}
    value_from = {"secretKeyRef": {"name": "n", "key": "k", "optional": True}}

    spec = Spec.from_object(
        rollout(model={"volume": volume}, engine={"env": [{"name": "A", "valueFrom": value_from}]})["spec"]
    )

    assert spec.model.volume == volume
    assert spec.engine.env[0].value_from == value_from


def test_error_names_the_field() -> None:
    with pytest.raises(ValidationError, match=r"spec\.execution\.state"):
        SGLangRollout.from_object(rollout(execution={"state": "Stopped"}))


def test_resource_is_frozen() -> None:
    resource = SGLangRollout.from_object(rollout())

    with pytest.raises(ValidationError, match="frozen"):
        resource.spec.replicas = 2


def test_round_trip() -> None:
    resource = SGLangRollout.from_object(rollout(weights={"version": "1"}))

    assert SGLangRollout.from_object(resource.to_object()) == resource
