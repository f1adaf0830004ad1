"""Attention by sequence length: time and memory."""
