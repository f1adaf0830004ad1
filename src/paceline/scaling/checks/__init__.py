"""What is wrong with a sweep, a fit or a claim."""
