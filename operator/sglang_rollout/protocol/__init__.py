"""What operator, agents, launchers and router sidecars say to each other. Standard library and cattrs only:
the agent runs on the Python of the engine's image."""
