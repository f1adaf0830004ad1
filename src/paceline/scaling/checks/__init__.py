"""Checks that find problems with a sweep, a fit or a published claim."""
