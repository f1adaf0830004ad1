"""Training steps by data-parallel strategy, interleaved in one run."""
