"""Goodput: the share of a long run that ends up in the model, when devices fail."""
