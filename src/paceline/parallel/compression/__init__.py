"""Averages of gradients in 8 or 4 bits, with feedback of what was rounded away."""
