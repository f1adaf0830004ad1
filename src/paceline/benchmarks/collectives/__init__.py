"""Collectives by size: all-reduce, all-gather, reduce-scatter and others."""
