"""Which versions of the weights there are: the one that spec wants, the one that the fleet has committed to, and
how far behind an engine may be and still serve."""

from __future__ import annotations

from ..api import Spec, WeightsStatus
from ..protocol.weights import WeightVersion

# The label of a fleet whose spec names none; SGLang's own word for it.
BOOT_VERSION = "default"


def target_version(spec: Spec) -> WeightVersion | None:
    """What spec wants the fleet to serve, without a path when a trainer has it; None under control External, where it
    is what the trainer has made it."""
    if spec.control == "External":
        return None
    source, label = spec.weights.source, spec.weights.version or BOOT_VERSION
    if source is None:
        return WeightVersion(label, spec.model.path)
    return WeightVersion(label, source.disk.path if source.disk is not None else "")


def boot_version(spec: Spec) -> WeightVersion:
    """What a new fleet starts with."""
    target = target_version(spec)
    return target if target and target.path else WeightVersion(BOOT_VERSION, spec.model.path)


def committed_version(weights: WeightsStatus) -> WeightVersion:
    """What the fleet serves. The history is never empty once the fleet was seen."""
    newest = weights.history[-1]
    return WeightVersion(newest.version, newest.path)


def bootable_version(weights: WeightsStatus) -> WeightVersion:
    """What engines that start now load: the newest committed version that lies in a folder. They catch up from it."""
    entry = next((entry for entry in reversed(weights.history) if entry.path), weights.history[-1])
    return WeightVersion(entry.version, entry.path)


def is_allowed(weights: WeightsStatus, version: str, max_lag: int) -> bool:
    """Whether an engine from which `version` was read back may serve: it was committed, and is no further behind
    the newest committed version than `max_lag`."""
    lag = weights.lag(version)
    return lag is not None and lag <= max_lag
