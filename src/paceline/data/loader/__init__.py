"""Batches from shards: memory-mapped, prefetched, resumable at any world size."""
