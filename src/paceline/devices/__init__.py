"""The device that a rank computes on: one seam for every kind, its hardware, named ranges."""
