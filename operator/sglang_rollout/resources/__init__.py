"""The children of a fleet as manifests: pure functions of the resource, one module a kind."""

from .context import FleetContext
from .fleet import fleet_children
from .identity import Manifest
from .overlay import UnusableSpec
from .services import headless_service
from .stateful_set import pod_template_hash, stateful_set

__all__ = [
    "FleetContext",
    "Manifest",
    "UnusableSpec",
    "fleet_children",
    "headless_service",
    "pod_template_hash",
    "stateful_set",
]
