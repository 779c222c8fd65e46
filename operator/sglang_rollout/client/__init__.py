"""For trainers and users of a fleet: `RolloutFleet.connect(name)`, then publish() and generate(). torch is only needed
where tensors are sent."""

from .errors import (
    FleetError,
    FleetUnreachable,
    GenerateFailed,
    GenerateLost,
    PublishFailed,
    PublishRefused,
    PublishTimedOut,
)
from .fleet import RolloutFleet
from .generation import Conversation, Generation, VersionSpan
from .publication import Prepared, PublishResult
from .verdict import EngineOutcome

__all__ = [
    "Conversation",
    "EngineOutcome",
    "FleetError",
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
