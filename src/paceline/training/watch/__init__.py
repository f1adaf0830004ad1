"""Checks during training: equal states, hangs, stragglers, losses."""
