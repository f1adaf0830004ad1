"""Parameters sharded too (ZeRO-3): gathered layer by layer, just in time."""
