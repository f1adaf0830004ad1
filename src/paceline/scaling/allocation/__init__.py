"""From a fit and a budget to a model's size and shape."""
