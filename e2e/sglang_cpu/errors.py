"""The error of these tools: a sentence for the person at the terminal."""

from __future__ import annotations

from e2e.cluster.errors import ClusterError


class SGLangCpuError(ClusterError):
    """The CPU engine's environment, models or process is not as it must be; the message says what to do."""
