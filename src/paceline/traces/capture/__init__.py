"""Records the ranks of a run on synchronised clocks."""
