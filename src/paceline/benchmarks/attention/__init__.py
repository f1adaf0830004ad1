"""Attention measured alone: time and memory by sequence length."""
