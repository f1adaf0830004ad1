"""Which records may be compared, and whether they differ."""
