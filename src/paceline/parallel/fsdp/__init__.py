"""Fully sharded data parallelism (ZeRO-3): parameters are gathered layer by layer, just in time."""
