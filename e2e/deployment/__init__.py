"""Our operator and its fleets on a cluster, as the demo, the tests and the benchmarks use them."""
