"""The layout to run: every candidate that divides and fits, the fastest, and why not another."""
