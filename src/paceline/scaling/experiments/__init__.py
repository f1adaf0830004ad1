"""Which runs to buy next, and from whom."""
