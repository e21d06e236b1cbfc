"""What tests and benchmarks share: digests of training state, runs on machines of their own, and the soak test."""
