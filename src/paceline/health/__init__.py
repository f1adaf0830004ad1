"""Health checks for a training loop: hangs, corrupted state, stragglers and loss spikes.

They take tensors, process groups and numbers, and know nothing of Paceline's own loop. Nothing is
imported here: the config and the errors load without torch.
"""
