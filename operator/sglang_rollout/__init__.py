"""Fleets of SGLang engines for reinforcement-learning rollouts, as one Kubernetes resource."""

__version__ = "0.1.0"
