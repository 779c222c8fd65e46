"""The StatefulSet of one engine: all its pods start together and are replaced only when somebody deletes them."""

from __future__ import annotations

import hashlib
import json

from ..api import SGLangRollout
from ..api.names import (
    ANNOTATION_TEMPLATE_HASH,
    COMPONENT_ENGINE,
    LABEL_COMPONENT,
    LABEL_ENGINE,
    LABEL_FLEET,
    engine_labels,
    engine_name,
)
from .context import FleetContext
from .engine_pod import engine_pod_template
from .identity import Manifest, child


def engine_selector(fleet: str, index: int) -> dict[str, str]:
    """Labels of the pods of one engine. A StatefulSet's selector can never be changed: these three stay."""
    return {LABEL_FLEET: fleet, LABEL_COMPONENT: COMPONENT_ENGINE, LABEL_ENGINE: str(index)}


def stateful_set(rollout: SGLangRollout, context: FleetContext, index: int) -> Manifest:
    """Raises UnusableSpec."""
    fleet = rollout.metadata.name
    template = engine_pod_template(rollout, context, index)
    return child(
        rollout,
        "apps/v1",
        "StatefulSet",
        engine_name(fleet, index),
        engine_labels(fleet, index),
        annotations={ANNOTATION_TEMPLATE_HASH: pod_template_hash(template)},
        spec={
            "replicas": rollout.spec.engine.nodes,
            "serviceName": engine_name(fleet, index),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": engine_selector(fleet, index)},
            "template": template,
        },
    )


def pod_template_hash(template: Manifest) -> str:
    """Equal for equal templates, whatever the order of their keys; 16 hexadecimal digits."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
