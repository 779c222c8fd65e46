"""Measurements that need special machines."""
