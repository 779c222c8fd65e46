"""The sidecar in each engine pod, the only one that drives its engine: it takes the operator's desired state, makes
it so and reports what is. It runs on the Python of the engine's image: aiohttp, pyjwt and cattrs only."""
