"""For trainers and users of a fleet: `RolloutFleet.connect(name)`, then publish() and generate(). torch is only needed
where tensors are sent."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    FleetError,
    FleetMissing,
    FleetUnreachable,
    GenerateFailed,
    GenerateLost,
    PublishFailed,
    PublishRefused,
    PublishTimedOut,
)

if TYPE_CHECKING:
    from .fleet import RolloutFleet
    from .generation import Conversation, Generation, VersionSpan
    from .results import Prepared, PublishResult
    from .verdict import EngineOutcome

__all__ = [
    "Conversation",
    "EngineOutcome",
    "FleetError",
    "FleetMissing",
    "FleetUnreachable",
    "GenerateFailed",
    "GenerateLost",
    "Generation",
    "Prepared",
    "PublishFailed",
    "PublishRefused",
    "PublishResult",
    "PublishTimedOut",
    "RolloutFleet",
    "VersionSpan",
]

# Imported when they are asked for: whoever only sends (client.room) needs no library for Kubernetes or HTTP.
_PLACES = {
    "RolloutFleet": ".fleet",
    "Conversation": ".generation",
    "Generation": ".generation",
    "VersionSpan": ".generation",
    "Prepared": ".results",
    "PublishResult": ".results",
    "EngineOutcome": ".verdict",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_PLACES[name], __name__), name)
