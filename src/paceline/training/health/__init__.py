"""Health checks of a run: hangs, corrupted state, stragglers and loss spikes."""
