"""In-memory checkpoints: the newest state, each shard with a replica on the next host."""
