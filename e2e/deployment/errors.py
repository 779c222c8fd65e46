"""The error of the deployment tools: what was waited for or asked, and what the cluster said instead."""

from __future__ import annotations

from e2e.cluster.errors import ClusterError


class DeploymentError(ClusterError):
    """A fleet, a chart or a request did not do what was asked; the message is for the person at the terminal."""
