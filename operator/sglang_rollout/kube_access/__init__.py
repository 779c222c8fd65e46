"""The API server as whoever uses fleets reaches it: by the kubeconfig and with the caller's own rights. All calls
block."""
