"""Memory and time of sharded optimizer state, rank by rank."""
