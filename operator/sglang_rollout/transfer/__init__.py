"""Moving weights as bytes: what they are (manifest), where they wait (stage) and how they are proven (digests).
What the engine's hook imports from here is standard library only."""
