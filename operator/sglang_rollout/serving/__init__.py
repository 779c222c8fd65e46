"""What the agent and the router's sidecar share as small HTTP servers that the operator calls: whom they obey, the
highest lease term, long-polled reports and JSON errors. aiohttp, pyjwt and the standard library only: the agent
runs on the Python of the engine's image."""
