"""Goodput: the fraction of a long run's time that is useful training despite device failures."""
