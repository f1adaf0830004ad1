"""Gradients averaged over ranks: naive, flat, overlapped and bucketed."""
