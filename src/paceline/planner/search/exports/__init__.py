"""A layout that was found, as other programs take it."""
