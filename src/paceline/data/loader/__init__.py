"""From shards to batches: memory-mapped, prefetched, resumable at any world size."""
