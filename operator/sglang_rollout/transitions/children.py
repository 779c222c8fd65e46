"""The manifests of a fleet that are to be applied now; a workload bears the hash of the spec that it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..protocol.weights import WeightVersion
from ..resources import UnusableSpec, fleet_children, headless_service, stateful_set
from .engines import EngineView
from .observed import Observed
from .planned import ANNOTATION_SPEC_HASH
from .revisions import Revision


def manifests(
    observed: Observed,
    engines: tuple[EngineView, ...],
    revision: Revision,
    boot: WeightVersion,
    engine_stamp: str,
    router_stamp: str,
) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """The children to apply. Names that belong to somebody else are left alone; diagnosis says so."""
    rollout, context = observed.rollout, observed.context
    try:
        made = [
            _stamped(manifest, router_stamp) if manifest["kind"] == "Deployment" else manifest
            for manifest in fleet_children(rollout, context, boot)
        ]
        for index in (engine.index for engine in engines if engine.wanted):
            made.append(headless_service(rollout, index))
            if index in revision.render:
                made.append(_stamped(stateful_set(rollout, context, index), engine_stamp))
    except UnusableSpec as error:
        return (), str(error)
    uid = rollout.metadata.uid
    free = [
        manifest
        for manifest in made
        if (child := observed.children.get((manifest["kind"], manifest["metadata"]["name"]))) is None
        or (child.owner_uid == uid and not child.terminating)
    ]
    return tuple(free), ""


def _stamped(manifest: Mapping[str, Any], stamp: str) -> dict[str, Any]:
    """A workload with the hash of the spec on itself and on its pods."""

    def annotate(metadata: Mapping[str, Any]) -> dict[str, Any]:
        return {**metadata, "annotations": {**metadata.get("annotations", {}), ANNOTATION_SPEC_HASH: stamp}}

    template = manifest["spec"]["template"]
    return {
        **manifest,
        "metadata": annotate(manifest["metadata"]),
        "spec": {**manifest["spec"], "template": {**template, "metadata": annotate(template["metadata"])}},
    }
