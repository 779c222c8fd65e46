"""Benchmarks: how fast the operator brings a fleet to what its spec asks for, and what it costs."""
