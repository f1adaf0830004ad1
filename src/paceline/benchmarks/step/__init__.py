"""One training step on one rank: forward, backward, optimizer."""
