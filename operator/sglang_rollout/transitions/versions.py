"""Which versions of the weights there are: the one that spec wants, the one that the fleet has committed to, and
how far behind an engine may be and still serve."""

from __future__ import annotations

from ..api import Spec, WeightsStatus
from ..protocol.weights import WeightVersion

# The label of a fleet whose spec names none; SGLang's own word for it.
BOOT_VERSION = "default"


def target_version(spec: Spec) -> WeightVersion | None:
    """What spec wants the fleet to serve; None while spec names a way to get there that is not ours to go."""
    source = spec.weights.source
    if spec.control == "External":
        return None
    if source is None:
        return WeightVersion(spec.weights.version or BOOT_VERSION, spec.model.path)
    if source.type == "Disk" and source.disk is not None:
        return WeightVersion(spec.weights.version or BOOT_VERSION, source.disk.path)
    return None


def boot_version(spec: Spec) -> WeightVersion:
    """What a new fleet starts with."""
    return target_version(spec) or WeightVersion(BOOT_VERSION, spec.model.path)


def committed_version(weights: WeightsStatus) -> WeightVersion:
    """What engines that start now load. The history is never empty once the fleet was seen."""
    newest = weights.history[-1]
    return WeightVersion(newest.version, newest.path)


def is_allowed(weights: WeightsStatus, version: str, max_lag: int) -> bool:
    """Whether an engine from which `version` was read back may serve: it was committed, and is no further behind
    the newest committed version than `max_lag`."""
    lag = weights.lag(version)
    return lag is not None and lag <= max_lag
