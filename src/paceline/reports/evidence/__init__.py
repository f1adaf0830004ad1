"""Selection of comparable records, and tests of whether they differ."""
