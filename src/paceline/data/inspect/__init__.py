"""Looking at a prepared dataset: is it intact, and what is in it."""
