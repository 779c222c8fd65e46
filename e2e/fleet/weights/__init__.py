"""Weights that a trainer in the cluster sends to a fleet of real engines: the whole way, with every fault on it."""
