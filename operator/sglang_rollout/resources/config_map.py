"""The fleet's ConfigMap: what its pods must know before the operator has spoken to them."""

from __future__ import annotations

import json
from dataclasses import replace

from ..api import SGLangRollout
from ..api.names import fleet_config_name, fleet_labels
from ..protocol.fleet import FleetConfig
from ..protocol.pod import FLEET_FILE
from ..protocol.weights import WeightVersion
from ..protocol.wire import to_wire
from .context import FleetContext
from .identity import Manifest, child
from .launch_flags import needed_flags


def fleet_config_map(rollout: SGLangRollout, context: FleetContext, boot: WeightVersion) -> Manifest:
    """boot: what an engine loads that starts while the operator is away; the last version committed."""
    metadata = rollout.metadata
    trust = replace(context.trust, trainers=trainers(rollout))
    config = FleetConfig(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        boot=boot,
        trust=trust,
        launch=needed_flags(rollout.spec),
    )
    text = json.dumps(to_wire(config), sort_keys=True, indent=1)
    name = fleet_config_name(metadata.name)
    return child(rollout, "v1", "ConfigMap", name, fleet_labels(metadata.name), data={FLEET_FILE: text})


def trainers(rollout: SGLangRollout) -> list[str]:
    """User names of the trainers' ServiceAccounts, as their tokens carry them."""
    return [
        f"system:serviceaccount:{account.namespace or rollout.metadata.namespace}:{account.name}"
        for account in rollout.spec.network.trainer_accounts
    ]
