"""The children of a fleet as manifests: pure functions of the resource, one module a kind."""

from .context import FleetContext
from .fleet import engine_children, fleet_children
from .identity import Manifest
from .overlay import UnusableSpec
from .stateful_set import pod_template_hash

__all__ = ["FleetContext", "Manifest", "UnusableSpec", "engine_children", "fleet_children", "pod_template_hash"]
