"""What runs in the router's pod: the start of smg behind its front, and the sidecar that keeps its workers. The
membership of a router that runs elsewhere is kept by the operator with the same code."""
