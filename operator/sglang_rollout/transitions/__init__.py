"""Pure state machines of a fleet: (resource, observed, now) -> what to do next."""
