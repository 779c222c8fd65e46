"""The launch flags that an engine needs for what spec asks of it."""

from __future__ import annotations

from ..api import Spec
from ..protocol.memory import LaunchOptions


def needed_flags(spec: Spec) -> LaunchOptions:
    """Under control External a trainer may release memory at any time and can give no flags itself."""
    memory = spec.memory
    backup = memory.weights_backup == "HostMemory"
    releases = "Released" in (memory.weights, memory.kv_cache, memory.cuda_graph)
    return LaunchOptions(memory_saver=releases or backup or spec.control == "External", weights_backup=backup)
